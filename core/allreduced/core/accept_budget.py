"""How many connections that come to nothing a listening socket puts up with per second."""

from __future__ import annotations

RATE = 100.0
"""Bad connections per second that are paid for; each costs an agent 0.1 to 0.2 ms of its loop."""

BURST = 200.0
"""Bad connections that may come at once."""


class AcceptBudget:
    """Decides when a listening socket may accept again. Pure: it is told the time, in seconds.

    Connections that turn out well cost nothing. One that sends garbage, says nothing or may not be here costs one unit,
    and units come back at ``rate`` per second. With none left, connections wait in the kernel's queue, where they cost
    the process nothing.
    """

    def __init__(self, rate: float = RATE, burst: float = BURST) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at = 0.0

    def bad(self, now: float) -> None:
        """Take note of a connection that came to nothing."""
        self._refill(now)
        self._left -= 1.0

    def wait(self, now: float) -> float:
        """Return the seconds until the next connection may be accepted, 0 for at once."""
        self._refill(now)
        return 0.0 if self._left >= 1.0 else (1.0 - self._left) / self._rate

    def _refill(self, now: float) -> None:
        self._left = min(self._left + (now - self._at) * self._rate, self._burst)
        self._at = now
