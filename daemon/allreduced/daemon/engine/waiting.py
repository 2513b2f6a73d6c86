"""The operations that wait for memory, in the order in which they are served: a heap with lazy deletion."""

from __future__ import annotations

import heapq

from allreduced.daemon.engine.operation import Operation, State


class Waiting:
    """All operations in state QUEUED.

    An operation's place only ever moves forward (its stamp becomes known, its last rank arrives), so that it is enough
    to enter it once more: the later place is stale, and is passed over because the operation was served by then.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[object, ...], int, Operation]] = []
        self._entered = 0
        self._bound = 64

    def enter(self, operation: Operation) -> None:
        """Add an operation, or take note that its place moved forward."""
        heap = self._heap
        self._entered += 1
        heapq.heappush(heap, (operation.order(), self._entered, operation))
        if len(heap) > self._bound:
            self._heap = [entry for entry in heap if entry[2].state is State.QUEUED]
            heapq.heapify(self._heap)
            self._bound = max(64, 2 * len(self._heap))

    def first(self) -> Operation | None:
        """Return the operation that is served next, or None."""
        heap = self._heap
        while heap:
            operation = heap[0][2]
            if operation.state is State.QUEUED:
                return operation
            heapq.heappop(heap)
        return None

    def leave(self, operation: Operation) -> None:
        """Take out the operation that :meth:`first` returned."""
        if self._heap and self._heap[0][2] is operation:
            heapq.heappop(self._heap)
