"""What all parts of the engine share during one event."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING

from allreduced.daemon.engine.actions import Action
from allreduced.daemon.engine.limits import Limits

if TYPE_CHECKING:
    from allreduced.daemon.engine.flights import Fetched, Job, Posting, Sending, Served
    from allreduced.daemon.engine.operation import Operation


class Context:
    """The actions made so far, the time of the event, and what is outstanding at the driver, by number."""

    __slots__ = (
        "_last",
        "clock",
        "counters",
        "deaf_until",
        "differing",
        "freed",
        "heard",
        "jobs",
        "limits",
        "node",
        "now",
        "out",
        "receives",
        "sends",
        "stale",
    )

    def __init__(self, node: str, limits: Limits) -> None:
        self.node = node
        self.limits = limits
        self.now = 0.0
        self.out: list[Action] = []
        self.clock = 0
        """Lamport clock of the stamps."""
        self.freed = False
        """Memory came back during this event: who waits for some may be served."""
        self.heard: dict[str, float] = {}
        """When each node was heard last."""
        self.deaf_until = -inf
        """Until when nothing counts as heard: this agent was held up."""
        self.differing: list[Operation] = []
        """First operations of lists that failed during this event because the lists differ."""
        self.stale: dict[Operation, None] = {}
        """Operations whose result is here and waits until a quorum is heard, in order."""
        self.receives: dict[int, Posting | Fetched] = {}
        self.sends: dict[int, Sending | Served] = {}
        self.jobs: dict[int, Job] = {}
        self.counters: Counter[str] = Counter()
        self._last = 0

    def hear(self, node: str) -> None:
        """Take note of a sign of life."""
        if self.now >= self.deaf_until:
            self.heard[node] = self.now

    def number(self) -> int:
        """Return a number that was not used before, for a receive, send, job, lease or operation."""
        self._last += 1
        return self._last
