"""The blocking communicator: what ``connect()`` returns."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Literal, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from allreduced.client.arrays import Array
from allreduced.client.attach import attach, read_options
from allreduced.client.moving import Moving
from allreduced.client.operation import Operation
from allreduced.client.place import Shape, check_shape
from allreduced.client.reducing import Reducing
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
    job_secret: str | bytes | None = None,
) -> Communicator:
    """Attach this process to its node's agent, and wait until all ranks of the group have done so.

    Everything that is not given comes from the launcher's variables (torchrun, srun, mpirun, `allreduced run`); a
    process that nobody launched is the only rank. ``socket``: the agent's, a path or ``@name``; else
    ``ALLREDUCED_SOCKET`` and the usual places are looked at, and where no agent runs a private one is started for the
    job, unless ``agent`` is ``"require"``. ``deadline``: seconds until all ranks must be there.
    ``default_deadline``: seconds for each operation that names none; the agent's ``failure.deadline`` (300 s) if it is
    left out. ``shared_memory``: false sends tensors through the socket, where descriptors cannot be passed.

    An agent that this process was attached to before, and that is not there now, is waited for until the deadline: it
    is being restarted.

    ``job_secret``: what all ranks of the job must give alike, else ``ALLREDUCED_JOB_SECRET``; it keeps processes out
    that run as the same user, as those of other containers do. It does not leave this process. A rank that gives
    another one than most ranks of its group is refused; the others do not notice it.

    :raises AuthenticationError: this user may not attach, or the job secret is missing or is not that of the others.
    :raises AgentUnavailable: there is no agent and none could be started.
    :raises InvalidArgument: a name is too long, or a deadline is no finite number of seconds above 0.
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
        job_secret=job_secret,
    )
    attached = drive(attach(options))
    session = Session(attached)
    return Communicator(session, job=options.launch.job, group=group)


class Communicator(Reducing, Moving):
    """One rank of a group. Made by :func:`connect`; safe to use from several threads, but not after a fork.

    Collectives are called by all ranks, in any order if they have names, else in the same order. Keywords that all
    have: ``name`` matches the call between ranks; ``deadline`` in seconds, from the call to its end on all ranks;
    ``priority``: higher goes first; ``algorithm``: see the documentation, normally left to the agent; ``async_op``
    returns a :class:`Work` at once. Inputs, ``out`` and the memory behind them belong to the agent until the call has
    ended; they must not be written meanwhile.

    When this node's agent is lost, everything in flight ends with AgentUnavailable at once; if nothing is, the next
    call raises it. The call after that attaches again: until its deadline it waits for the agent and for the other
    ranks, takes the same rank in a new group, where uses of names are counted from 1, and is its first operation.
    Arrays from before stay valid and are copied when they are given. When another rank or node was lost, every
    further call raises that RankLost or PeerLost; ``connect()`` in all processes forms the group anew.
    """

    def __init__(self, session: Session, *, job: str, group: str) -> None:
        super().__init__(session, job=job, group=group)
        self._session = session

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
            self._session.submit(operation)
            return Work(self._session, operation)
        return self._session.call(operation)
