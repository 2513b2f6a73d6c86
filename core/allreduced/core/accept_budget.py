"""How many connections of strangers a listening socket accepts per second."""

from __future__ import annotations

RATE = 50.0
"""Connections per second that are accepted though nothing comes of them; each costs an agent 0.2 ms of its loop."""

BURST = 100.0
"""Connections that may come at once before they have said who they are."""

LONGEST_WAIT = 0.05
"""Seconds after which it is asked again whether a connection may be accepted: those before it may be known by then."""


class AcceptBudget:
    """Decides when a listening socket may accept again. Pure: it is told the time, in seconds.

    Each connection costs one unit when it is accepted, which it gives back when it has said who it is. Units come back
    at ``rate`` per second, too, up to ``burst``. With none left, connections wait in the kernel's queue, where they
    cost the process nothing. So good connections wait for others only, and those that say nothing, send garbage or may
    not be here cost no more than ``rate`` per second.
    """

    def __init__(self, rate: float = RATE, burst: float = BURST) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at = 0.0

    def take(self, now: float) -> None:
        """Take note of a connection that was accepted, or that went bad after it had been good."""
        self._refill(now)
        self._left -= 1.0

    def give_back(self) -> None:
        """Take note that one of those that were accepted is good."""
        self._left = min(self._left + 1.0, self._burst)

    def wait(self, now: float) -> float:
        """Return 0 where a connection may be accepted, else the seconds after which to ask again."""
        self._refill(now)
        return 0.0 if self._left >= 1.0 else min((1.0 - self._left) / self._rate, LONGEST_WAIT)

    def _refill(self, now: float) -> None:
        self._left = min(self._left + (now - self._at) * self._rate, self._burst)
        self._at = now
