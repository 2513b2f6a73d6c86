"""What an asynchronous call returns."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

from allreduced.client.arguments import check_timeout
from allreduced.client.operation import Operation, WorkInfo, not_ended
from allreduced.client.session import Session
from allreduced.core.errors import AllReducedError

T_co = TypeVar("T_co", covariant=True)


class Work(Generic[T_co]):
    """An operation in flight. Its input and ``out`` belong to the agent until it has ended.

    Dropping a Work does not end the operation.
    """

    __slots__ = ("_operation", "_session")

    def __init__(self, session: Session, operation: Operation) -> None:
        self._session = session
        self._operation = operation

    def wait(self, timeout: float | None = None) -> T_co:
        """Return the result. ``timeout`` in seconds ends the wait and not the operation; None waits for its end.

        A ``timeout`` of 0 only looks. May be called again, also after a timeout, and from several threads; each call
        returns the same object.

        :raises WaitTimeout: the operation has not ended within ``timeout``; it goes on.
        :raises InvalidArgument: ``timeout`` is negative or no number.
        :raises AllReducedError: how the operation failed, on this rank as on all others.
        """
        if timeout is not None:
            timeout = check_timeout(timeout)
        if not self._session.wait(self._operation, timeout):
            raise not_ended(timeout)
        self._session.tell(self._operation.error)
        return cast("T_co", self._operation.outcome())

    def done(self) -> bool:
        """Return True if the operation has ended, well or not. Takes what has arrived, and never waits."""
        return self._session.wait(self._operation, 0.0)

    def exception(self) -> AllReducedError | None:
        """Return the error that the operation ended with, None if it ended well or has not ended yet."""
        self.done()
        self._session.tell(self._operation.error)
        return self._operation.error

    @property
    def info(self) -> WorkInfo | None:
        """Facts about the operation; None until it has ended well."""
        self.done()
        return self._operation.info

    def __repr__(self) -> str:
        return self._operation.describe("Work")
