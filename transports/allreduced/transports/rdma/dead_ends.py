"""GIDs that the kernel found no way to lately.

For RoCE the kernel looks for the hardware address of a GID while a queue pair is being connected, and where nobody
answers it holds the caller up for about a second (Linux: ``rdma_addr_find_l2_eth_by_grh``). No loop can afford that at
each attempt to make a link.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Final

from allreduced.transports.rdma.verbs_port import LocalPort, VerbsError

PERIOD: Final = 5.0
"""Seconds for which a GID is not tried again: as long as agents wait for each other by default."""
_MOST: Final = 1024
"""GIDs that are remembered."""
_NO_WAY: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})


def is_no_way(error: VerbsError) -> bool:
    """Tell whether a queue pair could not be connected because the kernel found no way to the GID."""
    return error.errno in _NO_WAY


class DeadEnds:
    """Those of one transport, from each port of this machine, with why."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: dict[tuple[str, int, bytes], tuple[float, str]] = {}

    def why(self, local: LocalPort, gid: bytes) -> str:
        """Return why a GID is not to be tried now; empty where it may be."""
        key = (local.device, local.port, gid)
        until, reason = self._found.get(key, (0.0, ""))
        if not reason or self._clock() < until:
            return reason
        del self._found[key]
        return ""

    def remember(self, local: LocalPort, gid: bytes, reason: str) -> None:
        """Take note that there is no way to a GID."""
        key = (local.device, local.port, gid)
        self._found.pop(key, None)
        if len(self._found) >= _MOST:
            del self._found[next(iter(self._found))]  # the oldest
        self._found[key] = self._clock() + PERIOD, reason
