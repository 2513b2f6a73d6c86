"""What the families of collectives need from the communicator that they are part of."""

from __future__ import annotations

from abc import ABC, abstractmethod

from allreduced.client.async_work import AsyncWork
from allreduced.client.operation import Operation
from allreduced.client.place import Place


class Starter(Place, ABC):
    """A communicator that starts operations and, unless asked not to, waits for them."""

    @abstractmethod
    def _start(self, operation: Operation, async_op: bool) -> object:
        """Start the operation; return its Work where ``async_op``, else its result."""


class AsyncStarter(Place, ABC):
    """A communicator for an event loop: what it starts is awaited."""

    @abstractmethod
    def _start(self, operation: Operation) -> AsyncWork[object]:
        """Start the operation."""
