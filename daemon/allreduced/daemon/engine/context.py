"""What all parts of the engine share during one event."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from allreduced.daemon.engine.actions import Action
from allreduced.daemon.engine.limits import Limits

if TYPE_CHECKING:
    from allreduced.daemon.engine.flights import Job, Posting, Sending


class Context:
    """The actions made so far, the time of the event, and what is outstanding at the driver, by number."""

    __slots__ = ("_last", "clock", "counters", "freed", "jobs", "limits", "node", "now", "out", "receives", "sends")

    def __init__(self, node: str, limits: Limits) -> None:
        self.node = node
        self.limits = limits
        self.now = 0.0
        self.out: list[Action] = []
        self.clock = 0
        """Lamport clock of the stamps."""
        self.freed = False
        """Memory came back during this event: who waits for some may be served."""
        self.receives: dict[int, Posting] = {}
        self.sends: dict[int, Sending] = {}
        self.jobs: dict[int, Job] = {}
        self.counters: Counter[str] = Counter()
        self._last = 0

    def number(self) -> int:
        """Return a number that was not used before, for a receive, send, job, lease or operation."""
        self._last += 1
        return self._last
