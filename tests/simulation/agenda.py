"""Virtual time: what happens when, in a fixed order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeAlias

Callback: TypeAlias = "Callable[[], None]"


class Agenda:
    """Callbacks by time; equal times in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self._entries: list[tuple[float, int, Callback]] = []
        self._planned = 0

    def at(self, time: float, callback: Callback) -> None:
        """Call ``callback`` at ``time`` (now, if that has passed)."""
        self._planned += 1
        heapq.heappush(self._entries, (max(time, self.now), self._planned, callback))

    def after(self, delay: float, callback: Callback) -> None:
        """Call ``callback`` in ``delay`` seconds."""
        self.at(self.now + delay, callback)

    def run(self, limit: int = 2_000_000) -> None:
        """Run until nothing is planned any more."""
        for _ in range(limit):
            if not self._entries:
                return
            self.now, _, callback = heapq.heappop(self._entries)
            callback()
        raise AssertionError(f"the simulation does not come to an end (time {self.now})")

    def run_until(self, time: float, limit: int = 2_000_000) -> None:
        """Run what is planned up to ``time``, which it is then."""
        entries = self._entries
        steps = 0
        while entries and entries[0][0] <= time:
            self.now, _, callback = heapq.heappop(entries)
            callback()
            steps += 1
            if steps > limit:
                raise AssertionError(f"the simulation does not come to an end (time {self.now})")
        self.steps += steps
        self.now = max(self.now, time)
