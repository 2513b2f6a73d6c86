"""The blocking communicator: what ``connect()`` returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from allreduced.client import call
from allreduced.client.arrays import Array, Foreign, TorchT
from allreduced.client.attach import attach, read_options
from allreduced.client.operation import Operation
from allreduced.client.place import Place, Shape, check_shape
from allreduced.client.session import Session
from allreduced.client.waiting import drive
from allreduced.client.work import Work

ScalarT = TypeVar("ScalarT", bound=np.generic)


def connect(
    *,
    job: str | None = None,
    group: str = "world",
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    socket: str | None = None,
    deadline: float = 300.0,
    default_deadline: float | None = None,
    shared_memory: bool = True,
    agent: Literal["auto", "require"] | None = None,
) -> Communicator:
    """Attach this process to its node's agent, and wait until all ranks of the group have done so.

    Everything that is not given comes from the launcher's variables (torchrun, srun, mpirun, `allreduced run`); a
    process that nobody launched is the only rank. ``socket``: the agent's, a path or ``@name``; else
    ``ALLREDUCED_SOCKET`` and the usual places are looked at, and where no agent runs a private one is started for the
    job, unless ``agent`` is ``"require"``. ``deadline``: seconds until all ranks must be there.
    ``default_deadline``: seconds for each operation that names none; the agent's ``failure.deadline`` (300 s) if it is
    left out. ``shared_memory``: false sends tensors through the socket, where descriptors cannot be passed.

    :raises AgentUnavailable: there is no agent and none could be started.
    :raises DeadlineExceeded: ranks are missing; ``missing`` names them.
    :raises RankClaimed: another live process holds this rank.
    :raises ConfigError: arguments or variables are out of range or contradict each other.
    """
    options = read_options(
        job=job,
        group=group,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        socket=socket,
        deadline=deadline,
        default_deadline=default_deadline,
        shared_memory=shared_memory,
        agent=agent,
    )
    attached = drive(attach(options))
    session = Session(attached)
    return Communicator(session, job=options.launch.job, group=group)


class Communicator(Place):
    """One rank of a group. Made by :func:`connect`; safe to use from several threads, but not after a fork.

    Collectives are called by all ranks, in any order if they have names, else in the same order. Keywords that all
    have: ``name`` matches the call between ranks; ``deadline`` in seconds, from the call to its end on all ranks;
    ``priority``: higher goes first; ``algorithm``: see the documentation, normally left to the agent; ``async_op``
    returns a :class:`Work` at once. Inputs, ``out`` and the memory behind them belong to the agent until the call has
    ended; they must not be written meanwhile.
    """

    def __init__(self, session: Session, *, job: str, group: str) -> None:
        super().__init__(session.joined, job=job, group=group)
        self._session = session

    # all_reduce

    @overload
    def all_reduce(
        self,
        x: npt.NDArray[ScalarT],
        *,
        op: str = ...,
        out: Array | None = ...,
        view: bool = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        deterministic: bool = ...,
        async_op: Literal[False] = ...,
    ) -> npt.NDArray[ScalarT]: ...

    @overload
    def all_reduce(
        self,
        x: npt.NDArray[ScalarT],
        *,
        op: str = ...,
        out: Array | None = ...,
        view: bool = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        deterministic: bool = ...,
        async_op: Literal[True],
    ) -> Work[npt.NDArray[ScalarT]]: ...

    @overload
    def all_reduce(
        self,
        x: TorchT,
        *,
        op: str = ...,
        out: TorchT | None = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        deterministic: bool = ...,
        async_op: Literal[False] = ...,
    ) -> TorchT: ...

    @overload
    def all_reduce(
        self,
        x: TorchT,
        *,
        op: str = ...,
        out: TorchT | None = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        deterministic: bool = ...,
        async_op: Literal[True],
    ) -> Work[TorchT]: ...

    @overload
    def all_reduce(
        self,
        x: Foreign,
        *,
        op: str = ...,
        out: Array | None = ...,
        view: bool = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        deterministic: bool = ...,
        async_op: Literal[False] = ...,
    ) -> Array: ...

    @overload
    def all_reduce(
        self,
        x: Foreign,
        *,
        op: str = ...,
        out: Array | None = ...,
        view: bool = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        deterministic: bool = ...,
        async_op: Literal[True],
    ) -> Work[Array]: ...

    def all_reduce(
        self,
        x: object,
        *,
        op: str = "sum",
        out: object = None,
        view: bool = False,
        name: str | None = None,
        deadline: float | None = None,
        priority: int = 0,
        algorithm: str | None = None,
        deterministic: bool = False,
        async_op: bool = False,
    ) -> object:
        """Combine the ``x`` of all ranks element by element and give every rank the same bits.

        ``op``: sum, prod, mean (floats and complex), min, max, land, lor, lxor (all but complex), band, bor, bxor
        (integers and bool); docs/numerics.md says what they compute, exactly. All ranks give the same shape, dtype and
        op. The result is a new array in the kind of ``x`` (NumPy or torch), or is written to ``out``, which may be
        ``x`` itself and need not be contiguous. ``view=True`` returns a read-only view of the node's result instead of
        a copy; its memory is the agent's until the array and all views of it are gone, so don't keep many.

        ``deterministic=True``: values are combined in one order, the ranks of a node and then the nodes, whatever the
        size of the tensor and the settings of the agents: every run with the same inputs and the same ranks on each
        node gives the same bits. It is ``algorithm="canonical"``, and costs little.

        :raises InvalidArgument: a dtype, op, shape or ``out`` that cannot be; no other rank is affected.
        :raises MismatchError: ranks called it differently; on all of them.
        :raises DeadlineExceeded: not all ranks came, or data did not, by the deadline.
        :raises RankLost: a process of the group ended.
        :raises PeerLost: an agent of the group did.
        :raises AgentUnavailable: this node's agent did.
        :raises LimitExceeded: the agent has no memory for it, or this client holds too many views.
        """
        options = call.Options(name, deadline, priority, algorithm, deterministic)
        return self._start(call.all_reduce(x, op=op, out=out, view=view, options=options), async_op)

    # all_reduce_many

    @overload
    def all_reduce_many(
        self,
        tensors: Sequence[npt.NDArray[ScalarT]],
        *,
        op: str = ...,
        out: Sequence[Array] | None = ...,
        view: bool = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        deterministic: bool = ...,
        async_op: Literal[False] = ...,
    ) -> list[npt.NDArray[ScalarT]]: ...

    @overload
    def all_reduce_many(
        self,
        tensors: Sequence[npt.NDArray[ScalarT]],
        *,
        op: str = ...,
        out: Sequence[Array] | None = ...,
        view: bool = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        deterministic: bool = ...,
        async_op: Literal[True],
    ) -> Work[list[npt.NDArray[ScalarT]]]: ...

    @overload
    def all_reduce_many(
        self,
        tensors: Sequence[TorchT],
        *,
        op: str = ...,
        out: Sequence[TorchT] | None = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        deterministic: bool = ...,
        async_op: Literal[False] = ...,
    ) -> list[TorchT]: ...

    @overload
    def all_reduce_many(
        self,
        tensors: Sequence[TorchT],
        *,
        op: str = ...,
        out: Sequence[TorchT] | None = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        deterministic: bool = ...,
        async_op: Literal[True],
    ) -> Work[list[TorchT]]: ...

    @overload
    def all_reduce_many(
        self,
        tensors: Sequence[Foreign],
        *,
        op: str = ...,
        out: Sequence[Array] | None = ...,
        view: bool = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        deterministic: bool = ...,
        async_op: Literal[False] = ...,
    ) -> list[Array]: ...

    @overload
    def all_reduce_many(
        self,
        tensors: Sequence[Foreign],
        *,
        op: str = ...,
        out: Sequence[Array] | None = ...,
        view: bool = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        deterministic: bool = ...,
        async_op: Literal[True],
    ) -> Work[list[Array]]: ...

    def all_reduce_many(
        self,
        tensors: Sequence[object],
        *,
        op: str = "sum",
        out: Sequence[object] | None = None,
        view: bool = False,
        name: str | None = None,
        deadline: float | None = None,
        priority: int = 0,
        algorithm: str | None = None,
        deterministic: bool = False,
        async_op: bool = False,
    ) -> object:
        """Combine each tensor of the list with its counterparts on the other ranks, and return the list of results.

        The tensors of one dtype travel as one operation, so a list of many small ones costs little more than one of
        their total size. They may differ in shape and dtype; all ranks give the same list of shapes. ``out``: one
        array for each tensor; may be ``tensors`` itself. Everything else, and the errors, as :meth:`all_reduce`.
        An empty list is fine and is not an operation.
        """
        options = call.Options(name, deadline, priority, algorithm, deterministic)
        return self._start(call.all_reduce_many(tensors, op=op, out=out, view=view, options=options), async_op)

    # broadcast

    @overload
    def broadcast(
        self,
        x: npt.NDArray[ScalarT],
        root: int = ...,
        *,
        out: Array | None = ...,
        view: bool = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        async_op: Literal[False] = ...,
    ) -> npt.NDArray[ScalarT]: ...

    @overload
    def broadcast(
        self,
        x: npt.NDArray[ScalarT],
        root: int = ...,
        *,
        out: Array | None = ...,
        view: bool = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        async_op: Literal[True],
    ) -> Work[npt.NDArray[ScalarT]]: ...

    @overload
    def broadcast(
        self,
        x: TorchT,
        root: int = ...,
        *,
        out: TorchT | None = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        async_op: Literal[False] = ...,
    ) -> TorchT: ...

    @overload
    def broadcast(
        self,
        x: TorchT,
        root: int = ...,
        *,
        out: TorchT | None = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        async_op: Literal[True],
    ) -> Work[TorchT]: ...

    @overload
    def broadcast(
        self,
        x: Foreign,
        root: int = ...,
        *,
        out: Array | None = ...,
        view: bool = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        async_op: Literal[False] = ...,
    ) -> Array: ...

    @overload
    def broadcast(
        self,
        x: Foreign,
        root: int = ...,
        *,
        out: Array | None = ...,
        view: bool = ...,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        algorithm: str | None = ...,
        async_op: Literal[True],
    ) -> Work[Array]: ...

    def broadcast(
        self,
        x: object,
        root: int = 0,
        *,
        out: object = None,
        view: bool = False,
        name: str | None = None,
        deadline: float | None = None,
        priority: int = 0,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> object:
        """Give every rank the ``x`` of rank ``root``. On the others ``x`` only tells shape and dtype.

        Returns a new array (``x`` is not written unless it is also ``out``). ``view`` and errors as
        :meth:`all_reduce`.
        """
        options = call.Options(name, deadline, priority, algorithm)
        operation = call.broadcast(x, root=root, rank=self.rank, size=self.size, out=out, view=view, options=options)
        return self._start(operation, async_op)

    # barrier

    @overload
    def barrier(
        self,
        *,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        async_op: Literal[False] = ...,
    ) -> None: ...

    @overload
    def barrier(
        self,
        *,
        name: str | None = ...,
        deadline: float | None = ...,
        priority: int = ...,
        async_op: Literal[True],
    ) -> Work[None]: ...

    def barrier(
        self,
        *,
        name: str | None = None,
        deadline: float | None = None,
        priority: int = 0,
        async_op: bool = False,
    ) -> object:
        """Wait until all ranks have called it. Errors as :meth:`all_reduce`."""
        return self._start(call.barrier(options=call.Options(name, deadline, priority, None)), async_op)

    # Memory

    @overload
    def empty(self, shape: Shape, dtype: type[ScalarT] | np.dtype[ScalarT]) -> npt.NDArray[ScalarT]: ...

    @overload
    def empty(self, shape: Shape, dtype: Literal["float32"] = ...) -> npt.NDArray[np.float32]: ...

    @overload
    def empty(self, shape: Shape, dtype: str) -> Array: ...

    def empty(self, shape: Shape, dtype: npt.DTypeLike = "float32") -> Array:
        """Return an uninitialised C-contiguous array in memory shared with the agent: submitting it copies nothing.

        Also parts of it that are contiguous are submitted without a copy. Its memory is used again when the array,
        all its views and all operations on it are gone. Arrays that are small enough to travel inside messages, and
        all where shared memory is off, are ordinary ones.

        :raises LimitExceeded: the agent has no memory for it.
        """
        extents, kind = check_shape(shape, dtype)
        nbytes = math.prod(extents) * kind.itemsize
        if not self._session.shared_memory or nbytes <= self._session.inline_limit:
            return np.empty(extents, kind)
        return self._session.allocate(nbytes).array(extents, kind)

    @overload
    def zeros(self, shape: Shape, dtype: type[ScalarT] | np.dtype[ScalarT]) -> npt.NDArray[ScalarT]: ...

    @overload
    def zeros(self, shape: Shape, dtype: Literal["float32"] = ...) -> npt.NDArray[np.float32]: ...

    @overload
    def zeros(self, shape: Shape, dtype: str) -> Array: ...

    def zeros(self, shape: Shape, dtype: npt.DTypeLike = "float32") -> Array:
        """Return :meth:`empty` filled with zeros."""
        _, kind = check_shape(shape, dtype)
        array = self.empty(shape, kind)
        array.fill(0)
        return array

    # The end

    def close(self) -> None:
        """Leave the group. What this rank submitted before still counts for the others.

        Works that are still pending here end with ClosedError, as do all later calls. Views stay valid. Calling it
        again does nothing. A process that ends without it leaves as orderly, unless it is killed.
        """
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, operation: Operation, async_op: bool) -> object:
        if async_op:
            if operation.parts:
                self._session.submit(operation)
            return Work(self._session, operation)
        return self._session.call(operation) if operation.parts else operation.outcome()
