"""One call of the user, as parts that each become one operation at the agent.

Most calls have one part; ``all_reduce_many`` has one for each dtype in its list. An :class:`Operation` ends once, with
a result or with the first error of its parts.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from allreduced.client.arrays import Array, Kind, in_kind
from allreduced.client.buffers import Lease
from allreduced.core.dtypes import DType
from allreduced.core.errors import AllReducedError, InternalError, InvalidArgument, WaitTimeout
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


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """What a call is, whatever its name: this must agree between ranks. That of equal calls is the same object.

    ``shape``: the text that is compared. ``nbytes``: of the tensor data. ``storage``: NumPy's type of its elements.
    """

    kind: str
    dtype: DType
    reduction: Reduction
    shape: str
    count: int
    root: int
    nbytes: int
    storage: np.dtype[np.generic]


@lru_cache(maxsize=4096)
def signature(kind: str, dtype: DType, reduction: Reduction, shape: str, count: int, root: int) -> Signature:
    """Return the signature of calls with these facts."""
    nbytes = count * dtype.itemsize
    return Signature(kind, dtype, reduction, shape, count, root, nbytes, np.dtype(dtype.storage))


class Sink(NamedTuple):
    """Where one tensor of a part's result goes: into ``out``, or to ``place`` of the results as a new array."""

    place: int
    shape: tuple[int, ...]
    out: Array | None
    out_object: object
    kind: Kind


class Outcome(NamedTuple):
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
        "download",
        "downloaded",
        "head",
        "hold",
        "name",
        "operation",
        "request",
        "signature",
        "sinks",
        "sources",
    )

    def __init__(self, signature: Signature, name: str, sources: tuple[Array, ...], sinks: tuple[Sink, ...]) -> None:
        self.signature = signature
        self.name = name
        self.sources = sources
        self.sinks = sinks
        self.hold: object = None
        """Keeps the input's shared memory from being used again while the agent reads it."""
        self.request = 0
        self.head: Outcome | None = None
        """The Done of a result that comes in pieces."""
        self.download: Array | None = None
        self.downloaded = 0
        self.operation: Operation

    def forget_input(self) -> None:
        """Let go of the input: the agent reads it no more."""
        self.sources = ()
        self.hold = None


class Operation:
    """One call: its parts, and how it ended. ``done`` is set last, after results and errors."""

    __slots__ = (
        "_facts",
        "_info",
        "_names",
        "algorithm",
        "deadline",
        "done",
        "error",
        "give_up_at",
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
        parts: tuple[Part, ...],
        *,
        results: int,
        single: bool,
        view: bool,
        deadline: float,
        priority: int,
        algorithm: str,
    ) -> None:
        self.parts = parts
        self._names: tuple[tuple[str, str], ...] = ()
        """Kinds and names of the parts, once these are gone."""
        self.results: list[object] = [None] * results
        self.single = single
        self.view = view
        self.deadline = deadline
        self.priority = priority
        self.algorithm = algorithm
        self.unended = len(parts)
        self.give_up_at = math.inf
        self.error: AllReducedError | None = None
        self.result: object = None
        self.done = False
        self._info: WorkInfo | None = None
        self._facts: list[tuple[tuple[int, ...], str, float, int]] = []
        """What WorkInfo tells, of each part that ended well."""
        for part in parts:
            part.operation = self

    def materialize(self, part: Part, outcome: Outcome) -> AllReducedError | None:
        """Bring the part's result to where the caller wants it. Copies; touches nothing that a lock guards.

        Does nothing where the operation has failed already: the caller may be using ``out`` again. Returns an error
        where there is no memory, or where ``out`` was made read-only meanwhile.
        """
        if self.done or outcome.data is None:
            return None
        data, offset = outcome.data, 0
        try:
            for sink in part.sinks:
                count = math.prod(sink.shape)
                piece = data if count == data.size else data[offset : offset + count]
                if piece.shape != sink.shape:
                    piece = piece.reshape(sink.shape)
                offset += count
                if sink.out is not None:
                    np.copyto(sink.out, piece)
                    self.results[sink.place] = sink.out_object
                    continue
                if self.view:
                    piece.flags.writeable = False
                elif not (outcome.owned and len(part.sinks) == 1):
                    piece = piece.copy()
                self.results[sink.place] = in_kind(piece, part.signature.dtype, sink.kind)
        except (MemoryError, ValueError) as error:
            return InvalidArgument(f"the result cannot be stored: {error}")
        return None

    def part_done(self, part: Part, outcome: Outcome, error: AllReducedError | None) -> None:
        """Count the part as ended; ``error`` is what :meth:`materialize` said."""
        if error is not None:
            self.part_failed(part, error)
            return
        part.forget_input()
        if self.done:
            return
        self._facts.append((outcome.participants, outcome.algorithm, outcome.elapsed, part.signature.nbytes))
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
        if not self.single:
            self.result = self.results
        elif self.results:
            self.result = self.results[0]
        self._end()

    @property
    def info(self) -> WorkInfo | None:
        """Facts about a call that ended well; None before, and where it failed."""
        if self._info is None and self.done and self.error is None:
            self._info = self._sum_up()
        return self._info

    def _sum_up(self) -> WorkInfo:
        if len(self._facts) == 1:
            return WorkInfo(*self._facts[0])
        return WorkInfo(
            participants=tuple(sorted({rank for participants, *_ in self._facts for rank in participants})),
            algorithm=",".join(dict.fromkeys(algorithm for _, algorithm, _, _ in self._facts)),
            elapsed=max((elapsed for _, _, elapsed, _ in self._facts), default=0.0),
            nbytes=sum(nbytes for *_, nbytes in self._facts),
        )

    def _end(self) -> None:
        # Parts refer to their operation: the circle would keep results alive until the garbage collector comes.
        self._names = self._told_names()
        self.parts = ()
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
        label = ", ".join(f"{what} {name or 'unnamed'}" for what, name in self._told_names())
        return f"<{kind} {label or 'of nothing'}: {state}>"

    def _told_names(self) -> tuple[tuple[str, str], ...]:
        return self._names or tuple([(part.signature.kind, part.name) for part in self.parts])


def not_ended(timeout: float | None) -> WaitTimeout:
    """Return the error of a wait that was over after ``timeout`` seconds, before the operation was."""
    return WaitTimeout(
        f"the operation has not ended within {timeout or 0:g} s; it goes on",
        hint="wait again, or give the operation a deadline= to end it",
    )
