"""The pulse of the agent: shows the service manager that the event loop gets on, and what the agent does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from allreduced.daemon.service_manager import ServiceManager

LONGEST_INTERVAL = 5.0
"""Seconds between two looks at the status."""

_BEATS = 3
"""Beats within the time after which the watchdog bites: two may come late."""


class Pulse:
    """A timer of the running loop, and nothing else: a loop that is stuck, or a stopped process, has no pulse.

    ``status``: says in a few words what the agent does. Nothing is told before :meth:`start`.
    """

    def __init__(self, manager: ServiceManager, status: Callable[[], str]) -> None:
        self._manager = manager
        self._status = status
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._interval = min(LONGEST_INTERVAL, manager.watchdog / _BEATS) if manager.watchdog else LONGEST_INTERVAL

    @property
    def interval(self) -> float:
        """Seconds between two beats."""
        return self._interval

    def start(self) -> None:
        """Beat at once and from then on, if there is a service manager."""
        if self._manager.listens:
            self._beat()

    def close(self) -> None:
        """Beat no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat(self) -> None:
        self._timer = self._loop.call_later(self._interval, self._beat)
        self._manager.alive(self._status())
