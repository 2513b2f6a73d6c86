"""One call of the user, as parts that each become one operation at the agent.

Most calls have one part; ``all_reduce_many`` has one for each dtype in its list. An :class:`Operation` ends once, with
a result or with the first error of its parts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from allreduced.client.arrays import Array, Kind, in_kind
from allreduced.client.buffers import Lease
from allreduced.core.dtypes import DType
from allreduced.core.errors import AllReducedError, InternalError, InvalidArgument
from allreduced.core.reductions import Reduction


@dataclass(frozen=True, slots=True)
class WorkInfo:
    """Facts about an operation that ended well.

    ``participants``: the ranks whose contributions are in the result, ascending. ``elapsed``: seconds from this
    rank's submit to the end, at the agent. ``nbytes``: size of the result. For several dtypes in one
    ``all_reduce_many``: bytes in all, the longest time, the algorithms joined by commas.
    """

    participants: tuple[int, ...]
    algorithm: str
    elapsed: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Sink:
    """Where one tensor of a part's result goes: into ``out``, or to place ``index`` of the results as a new array."""

    index: int
    shape: tuple[int, ...]
    out: Array | None
    out_object: object
    kind: Kind


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the agent said at the end of one part: ``data`` is the flat result, ``owned`` if nobody else has it."""

    data: Array | None
    owned: bool
    lease: Lease | None
    participants: tuple[int, ...]
    algorithm: str
    elapsed: float


class Part:
    """One operation at the agent: what is sent, what its memory is, where the result goes."""

    __slots__ = (
        "count",
        "download",
        "downloaded",
        "dtype",
        "head",
        "hold",
        "kind",
        "name",
        "operation",
        "reduction",
        "request",
        "root",
        "shape",
        "sinks",
        "sources",
    )

    def __init__(
        self,
        *,
        kind: str,
        name: str,
        dtype: DType,
        reduction: Reduction,
        shape: str,
        count: int,
        root: int,
        sources: Sequence[Array],
        sinks: Sequence[Sink],
    ) -> None:
        self.kind = kind
        self.name = name
        self.dtype = dtype
        self.reduction = reduction
        self.shape = shape
        self.count = count
        self.root = root
        self.sources: tuple[Array, ...] = tuple(sources)
        self.sinks: tuple[Sink, ...] = tuple(sinks)
        self.hold: object = None
        """Keeps the input's shared memory from being used again while the agent reads it."""
        self.request = 0
        self.head: Outcome | None = None
        """The Done of a result that comes in pieces."""
        self.download: Array | None = None
        self.downloaded = 0
        self.operation: Operation

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor data."""
        return self.count * self.dtype.itemsize

    def forget_input(self) -> None:
        """Let go of the input: the agent reads it no more."""
        self.sources = ()
        self.hold = None


class Operation:
    """One call: its parts, and how it ended. ``done`` is set last, after results and errors."""

    __slots__ = (
        "_names",
        "_outcomes",
        "algorithm",
        "deadline",
        "done",
        "error",
        "give_up_at",
        "info",
        "parts",
        "priority",
        "result",
        "results",
        "single",
        "unended",
        "view",
    )

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        results: int,
        single: bool,
        view: bool,
        deadline: float,
        priority: int,
        algorithm: str,
    ) -> None:
        self.parts = tuple(parts)
        self._names = [(part.kind, part.name) for part in self.parts]
        self.results: list[object] = [None] * results
        self.single = single
        self.view = view
        self.deadline = deadline
        self.priority = priority
        self.algorithm = algorithm
        self.unended = len(self.parts)
        self.give_up_at = math.inf
        self.error: AllReducedError | None = None
        self.result: object = None
        self.info: WorkInfo | None = None
        self.done = False
        self._outcomes: list[tuple[int, Outcome]] = []
        for part in self.parts:
            part.operation = self
        if not self.parts:
            self._succeed()

    def materialize(self, part: Part, outcome: Outcome) -> AllReducedError | None:
        """Bring the part's result to where the caller wants it. Copies; touches nothing that a lock guards.

        Does nothing where the operation has failed already: the caller may be using ``out`` again. Returns an error
        where there is no memory, or where ``out`` was made read-only meanwhile.
        """
        if self.done or outcome.data is None:
            return None
        try:
            self._materialize(part, outcome.data, outcome.owned)
        except (MemoryError, ValueError) as error:
            return InvalidArgument(f"the result cannot be stored: {error}")
        return None

    def _materialize(self, part: Part, data: Array, owned: bool) -> None:
        offset = 0
        for sink in part.sinks:
            count = math.prod(sink.shape)
            piece = data if count == data.size else data[offset : offset + count]
            if piece.shape != sink.shape:
                piece = piece.reshape(sink.shape)
            offset += count
            if sink.out is not None:
                np.copyto(sink.out, piece)
                self.results[sink.index] = sink.out_object
                continue
            if self.view:
                piece.flags.writeable = False
            elif not (owned and len(part.sinks) == 1):
                piece = piece.copy()
            self.results[sink.index] = in_kind(piece, part.dtype, sink.kind)

    def part_done(self, part: Part, outcome: Outcome, error: AllReducedError | None) -> None:
        """Count the part as ended; ``error`` is what :meth:`materialize` said."""
        if error is not None:
            self.part_failed(part, error)
            return
        part.forget_input()
        if self.done:
            return
        self._outcomes.append((part.nbytes, outcome))
        self.unended -= 1
        if self.unended == 0:
            self._succeed()

    def part_failed(self, part: Part | None, error: AllReducedError) -> None:
        """End the operation with ``error`` unless it has ended."""
        if part is not None:
            part.forget_input()
        if self.done:
            return
        self.error = error
        self.results = []
        self._end()

    def _succeed(self) -> None:
        if len(self._outcomes) == 1:
            [(nbytes, outcome)] = self._outcomes
            self.info = WorkInfo(outcome.participants, outcome.algorithm, outcome.elapsed, nbytes)
        else:
            self._sum_up()
        if not self.single:
            self.result = self.results
        elif self.results:
            self.result = self.results[0]
        self._end()

    def _sum_up(self) -> None:
        outcomes = [outcome for _, outcome in self._outcomes]
        ranks = {rank for outcome in outcomes for rank in outcome.participants}
        self.info = WorkInfo(
            participants=tuple(sorted(ranks)),
            algorithm=",".join(dict.fromkeys(outcome.algorithm for outcome in outcomes)),
            elapsed=max((outcome.elapsed for outcome in outcomes), default=0.0),
            nbytes=sum(nbytes for nbytes, _ in self._outcomes),
        )

    def _end(self) -> None:
        # Parts refer to their operation: the circle would keep results alive until the garbage collector comes.
        self.parts = ()
        self._outcomes = []
        self.done = True

    def outcome(self) -> object:
        """Return the result of a call that has ended.

        :raises AllReducedError: it ended with this error.
        """
        if self.error is not None:
            # A copy: a stored error that is raised would keep the frames of its raisers, with their arrays, alive.
            raise copy.copy(self.error)
        if not self.done:
            raise InternalError("the outcome of an operation was asked for before its end")
        return self.result

    def describe(self, kind: str) -> str:
        """Return a text for ``repr``."""
        state = "pending"
        if self.done:
            state = "failed" if self.error is not None else "done"
        label = ", ".join(f"{what} {name or 'unnamed'}" for what, name in self._names)
        return f"<{kind} {label or 'of nothing'}: {state}>"
