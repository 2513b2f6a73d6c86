"""How long a private agent lives: until the clients of its job have come and gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

FIRST_CLIENT = 60.0
"""Seconds that a private agent waits for its first client."""

LINGER = 1.0
"""Seconds that it stays without clients after that: the next run of a job may follow at once."""


class Lifetime:
    """Calls ``end`` once, on the running loop, when nobody came or nobody is left. Nothing is asked again and again."""

    def __init__(self, end: Callable[[], None], *, first_client: float = FIRST_CLIENT, linger: float = LINGER) -> None:
        self._end = end
        self._linger = linger
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._give_up_at = self._loop.time() + first_client
        self.clients_changed(0, served=False)

    def clients_changed(self, connections: int, *, served: bool) -> None:
        """Take note of how many clients are connected now, and whether any was ever ``served``."""
        self.close()
        if not connections:
            at = self._loop.time() + self._linger if served else self._give_up_at
            self._timer = self._loop.call_at(at, self._end)

    def close(self) -> None:
        """End nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
