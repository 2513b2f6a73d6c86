"""When operations and rounds have to be looked at again: a heap with lazy deletion, next to free."""

from __future__ import annotations

import heapq
from math import inf
from typing import Generic, Protocol, TypeVar

from allreduced.daemon.engine.actions import SetTimer
from allreduced.daemon.engine.context import Context


class Timed(Protocol):
    """What may have a time. ``wake``: seconds on the engine's clock, below 0 for none; only timers write it."""

    wake: float


T = TypeVar("T", bound=Timed)


class Timers(Generic[T]):
    """One entry per timed thing counts: the one that equals its ``wake``."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._heap: list[tuple[float, int, T]] = []
        self._armed: float | None = None
        self._bound = 64

    def set(self, timed: T, at: float) -> None:
        """Look at it at this time; replaces the time set before."""
        if timed.wake == at:
            return
        timed.wake = at
        heap = self._heap
        heapq.heappush(heap, (at, self._context.number(), timed))
        if self._armed is None or at < self._armed:
            self._armed = at
            self._context.out.append(SetTimer(at))
        if len(heap) > self._bound:
            self._heap = [entry for entry in heap if entry[0] == entry[2].wake]
            heapq.heapify(self._heap)
            self._bound = max(64, 2 * len(self._heap))

    def sooner(self, timed: T, at: float) -> None:
        """Look at it at this time, if not before. Infinite: never."""
        if at < (timed.wake if timed.wake >= 0.0 else inf):
            self.set(timed, at)

    def due(self) -> list[T]:
        """Return those whose time has come, earliest first. Call :meth:`arm` after handling them."""
        heap, now = self._heap, self._context.now
        found = []
        self._armed = None
        while heap and heap[0][0] <= now:
            at, _, timed = heapq.heappop(heap)
            if at == timed.wake:
                timed.wake = -1.0
                found.append(timed)
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
