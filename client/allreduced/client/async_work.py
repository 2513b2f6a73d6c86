"""What a call of the asyncio communicator returns."""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, TypeVar, cast

from allreduced.client.arguments import check_timeout
from allreduced.client.async_session import AsyncSession
from allreduced.client.operation import Operation, WorkInfo, not_ended
from allreduced.core.errors import AllReducedError

T_co = TypeVar("T_co", covariant=True)


class AsyncWork(Generic[T_co]):
    """An operation in flight; ``await`` it for its result. Its input and ``out`` belong to the agent until it ended.

    Cancelling a task that awaits it ends that wait and not the operation. Dropping it does not either.
    """

    __slots__ = ("_operation", "_session")

    def __init__(self, session: AsyncSession, operation: Operation) -> None:
        self._session = session
        self._operation = operation

    def __await__(self) -> Generator[object, None, T_co]:
        return self.wait().__await__()

    async def wait(self, timeout: float | None = None) -> T_co:
        """Return the result. ``timeout`` in seconds ends the wait and not the operation; None waits for its end.

        :raises WaitTimeout: the operation has not ended within ``timeout``; it goes on.
        :raises InvalidArgument: ``timeout`` is negative or no number.
        :raises AllReducedError: how the operation failed, on this rank as on all others.
        """
        if timeout is not None:
            timeout = check_timeout(timeout)
        if not await self._session.wait(self._operation, timeout):
            raise not_ended(timeout)
        self._session.tell(self._operation.error)
        return cast("T_co", self._operation.outcome())

    def done(self) -> bool:
        """Return True if the operation has ended, well or not."""
        return self._operation.done

    def exception(self) -> AllReducedError | None:
        """Return the error that the operation ended with, None if it ended well or has not ended yet."""
        self._session.tell(self._operation.error)
        return self._operation.error

    @property
    def info(self) -> WorkInfo | None:
        """Facts about the operation; None until it has ended well."""
        return self._operation.info

    def __repr__(self) -> str:
        return self._operation.describe("AsyncWork")
