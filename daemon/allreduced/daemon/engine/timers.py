"""When operations have to be looked at again: a heap with lazy deletion, so that it costs next to nothing."""

from __future__ import annotations

import heapq

from allreduced.daemon.engine.actions import SetTimer
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.operation import Operation


class Timers:
    """One entry per operation counts: the one that equals ``operation.wake``."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._heap: list[tuple[float, int, Operation]] = []
        self._armed: float | None = None
        self._bound = 64

    def set(self, operation: Operation, at: float) -> None:
        """Look at the operation at this time; replaces the time set before."""
        if operation.wake == at:
            return
        operation.wake = at
        heap = self._heap
        heapq.heappush(heap, (at, self._context.number(), operation))
        if self._armed is None or at < self._armed:
            self._armed = at
            self._context.out.append(SetTimer(at))
        if len(heap) > self._bound:
            self._heap = [entry for entry in heap if entry[0] == entry[2].wake]
            heapq.heapify(self._heap)
            self._bound = max(64, 2 * len(self._heap))

    def due(self) -> list[Operation]:
        """Return the operations whose time has come, earliest first. Call :meth:`arm` after handling them."""
        heap, now = self._heap, self._context.now
        found = []
        self._armed = None
        while heap and heap[0][0] <= now:
            at, _, operation = heapq.heappop(heap)
            if at == operation.wake:
                operation.wake = -1.0
                found.append(operation)
        return found

    def arm(self) -> None:
        """Ask for the next TimePassed."""
        heap = self._heap
        while heap and heap[0][0] != heap[0][2].wake:
            heapq.heappop(heap)
        at = heap[0][0] if heap else None
        if at != self._armed:
            self._armed = at
            self._context.out.append(SetTimer(at))
