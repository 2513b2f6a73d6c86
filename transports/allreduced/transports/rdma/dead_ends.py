"""GIDs that queue pairs could not be connected to lately.

For RoCE the kernel looks for the hardware address of a GID while a queue pair is being connected, and where nobody
answers it holds the caller up for about a second (Linux: ``rdma_addr_find_l2_eth_by_grh``). No loop can afford that at
each attempt to make a link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

PERIOD: Final = 10.0
"""Seconds for which a GID is not tried again."""
_MOST: Final = 1024
"""GIDs that are remembered."""


class DeadEnds:
    """Those of one transport, each with why."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: dict[bytes, tuple[float, str]] = {}

    def why(self, gid: bytes) -> str:
        """Return why a GID is not to be tried now; empty where it may be."""
        until, reason = self._found.get(gid, (0.0, ""))
        if not reason or self._clock() < until:
            return reason
        del self._found[gid]
        return ""

    def remember(self, gid: bytes, reason: str) -> None:
        """Take note that a GID could not be connected to."""
        self._found.pop(gid, None)
        if len(self._found) >= _MOST:
            del self._found[next(iter(self._found))]  # the oldest
        self._found[gid] = self._clock() + PERIOD, reason
