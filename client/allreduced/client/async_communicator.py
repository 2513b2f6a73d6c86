"""The asyncio communicator."""

from __future__ import annotations

import math
from collections.abc import Generator
from types import TracebackType
from typing import Literal, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from allreduced.client.arrays import Array
from allreduced.client.async_moving import AsyncMoving
from allreduced.client.async_reducing import AsyncReducing
from allreduced.client.async_session import AsyncSession
from allreduced.client.async_waiting import drive
from allreduced.client.async_work import AsyncWork
from allreduced.client.attach import Options, attach, read_options
from allreduced.client.operation import Operation
from allreduced.client.place import Shape, check_shape

ScalarT = TypeVar("ScalarT", bound=np.generic)


class AsyncCommunicator(AsyncReducing, AsyncMoving):
    """One rank of a group, for the event loop on which it was made.

    Made by ``async with AsyncCommunicator.connect() as comm`` or ``comm = await AsyncCommunicator.connect()``.
    Every collective starts at its call, in the order of the calls, and returns an :class:`AsyncWork` to await.
    What they mean, keywords and errors: see :class:`allreduced.client.Communicator`. ``async_op`` is accepted and
    changes nothing. Results are copied on the loop; ``view=True`` avoids that for large ones.

    Calls made while the agent that follows a lost one is waited for start in their order when it is there. Each waits
    until its deadline; when one gives up, those that wait with it do, so that none passes another.
    """

    def __init__(self, session: AsyncSession, *, job: str, group: str) -> None:
        super().__init__(session, job=job, group=group)
        self._session = session

    @staticmethod
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
    ) -> Connecting:
        """Attach to this node's agent, as :func:`allreduced.client.connect` does, with the same errors.

        Await the returned object, or use it in ``async with``, once. Cancelling gives the rank back.
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
        return Connecting(options)

    @overload
    async def empty(self, shape: Shape, dtype: type[ScalarT] | np.dtype[ScalarT]) -> npt.NDArray[ScalarT]: ...

    @overload
    async def empty(self, shape: Shape, dtype: Literal["float32"] = ...) -> npt.NDArray[np.float32]: ...

    @overload
    async def empty(self, shape: Shape, dtype: str) -> Array: ...

    async def empty(self, shape: Shape, dtype: npt.DTypeLike = "float32") -> Array:
        """Return an uninitialised array in memory shared with the agent: submitting it copies nothing.

        :raises LimitExceeded: the agent has no memory for it.
        """
        extents, kind = check_shape(shape, dtype)
        nbytes = math.prod(extents) * kind.itemsize
        if not self._session.shared_memory or nbytes <= self._session.inline_limit:
            return np.empty(extents, kind)
        return (await self._session.allocate(nbytes)).array(extents, kind)

    @overload
    async def zeros(self, shape: Shape, dtype: type[ScalarT] | np.dtype[ScalarT]) -> npt.NDArray[ScalarT]: ...

    @overload
    async def zeros(self, shape: Shape, dtype: Literal["float32"] = ...) -> npt.NDArray[np.float32]: ...

    @overload
    async def zeros(self, shape: Shape, dtype: str) -> Array: ...

    async def zeros(self, shape: Shape, dtype: npt.DTypeLike = "float32") -> Array:
        """Return :meth:`empty` filled with zeros."""
        _, kind = check_shape(shape, dtype)
        array = await self.empty(shape, kind)
        array.fill(0)
        return array

    async def close(self) -> None:
        """Leave the group. Works that are still pending here end with ClosedError; views stay valid."""
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _start(self, operation: Operation) -> AsyncWork[object]:
        self._session.submit(operation)
        return AsyncWork(self._session, operation)


class Connecting:
    """A connection that is about to be made: to be awaited, or entered with ``async with``, once."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._communicator: AsyncCommunicator | None = None

    def __await__(self) -> Generator[object, None, AsyncCommunicator]:
        return self._connect().__await__()

    async def __aenter__(self) -> AsyncCommunicator:
        self._communicator = await self._connect()
        return self._communicator

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._communicator is not None:
            await self._communicator.close()

    async def _connect(self) -> AsyncCommunicator:
        options = self._options
        attached = await drive(attach(options))
        session = AsyncSession(attached)
        return AsyncCommunicator(session, job=options.launch.job, group=options.group)
