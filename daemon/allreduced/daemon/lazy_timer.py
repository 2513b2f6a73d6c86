"""A timer that is moved often and rings rarely."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LazyTimer:
    """Calls ``ring`` on the running loop once the time set last has come.

    Moving it later, which every operation does, costs nothing: the pending call notices when it comes too early.
    ``clock`` must run with the loop's clock.
    """

    def __init__(self, clock: Callable[[], float], ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._at: float | None = None
        self._armed_at = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at: float | None) -> None:
        """Ring at ``at`` on the clock and not at the time set before. None: do not ring."""
        self._at = at
        if at is not None and (self._handle is None or at < self._armed_at):
            self._arm(at)

    def close(self) -> None:
        """Never ring again."""
        self._at = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self, at: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._armed_at = at
        self._handle = asyncio.get_running_loop().call_later(max(0.0, at - self._clock()), self._come)

    def _come(self) -> None:
        self._handle = None
        if self._at is None:
            return
        if self._clock() < self._at:  # moved meanwhile, or the loop's clock is coarse
            self._arm(self._at)
            return
        self._at = None
        self._ring()
