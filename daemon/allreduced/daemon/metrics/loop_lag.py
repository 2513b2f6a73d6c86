"""Does the event loop make progress? A timer that looks how late it is called."""

from __future__ import annotations

import asyncio

from allreduced.daemon.histogram import Histogram

PERIOD = 0.1
"""Seconds between two looks: a stall that is shorter may be missed."""

BOUNDS = (1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds up to which each bucket goes."""


class LoopLag:
    """Looks ten times a second, on the running loop, from :meth:`start` to :meth:`close`."""

    def __init__(self) -> None:
        self.seconds = Histogram(BOUNDS)
        self.last = 0.0
        """Loop time of the last look."""
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look."""
        self.last = asyncio.get_running_loop().time()
        self._set()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def since(self) -> float:
        """Return the seconds since the last look: well over ``PERIOD`` where the loop is, or was, held up."""
        return asyncio.get_running_loop().time() - self.last

    def _set(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + PERIOD
        self._timer = loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self.last = asyncio.get_running_loop().time()
        self.seconds.observe(max(self.last - self._due, 0.0))
        self._set()
