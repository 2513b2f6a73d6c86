"""The receives that the peer may write to: for each a region that is exactly its memory, until the receive is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from allreduced.transports.postings import Posting
from allreduced.transports.rdma.endpoint import Endpoint
from allreduced.transports.rdma.verbs_port import Region

REVOKE_TIMEOUT: Final = 2.0
"""Seconds that the peer has to confirm that it writes to a cancelled receive no more."""


@dataclass(slots=True)
class _Exposure:
    posting: Posting
    region: Region
    revoking: asyncio.TimerHandle | None = None


class Exposures:
    """Those of one link. Receives are named by their serials, which are never used twice."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._exposed: dict[int, _Exposure] = {}

    def __contains__(self, serial: int) -> bool:
        """Tell whether the peer may write to it."""
        return serial in self._exposed

    def open(self, posting: Posting, address: int) -> int:
        """Let the peer write to a receive that begins at ``address``; return the key for that.

        :raises VerbsError: its memory cannot be registered.
        """
        region = self._endpoint.register(address, posting.size, writable=True)
        self._exposed[posting.serial] = _Exposure(posting, region)
        return region.remote_key

    def revoke(self, serial: int, unanswered: Callable[[int], None]) -> None:
        """Expect the word of the peer that it writes no more; ``unanswered`` is called where that takes too long."""
        loop = asyncio.get_running_loop()
        self._exposed[serial].revoking = loop.call_later(REVOKE_TIMEOUT, unanswered, serial)

    def is_revoked(self, serial: int) -> bool:
        """Tell whether the word of the peer is expected still. It may come too late, or for what was never posted."""
        exposure = self._exposed.get(serial)
        return exposure is not None and exposure.revoking is not None

    def close(self, serial: int) -> Posting | None:
        """Let the peer write to a receive no more; return it, or None where it may not anyway.

        :raises VerbsError: the device refuses; the memory is free once the endpoint is closed.
        """
        exposure = self._exposed.pop(serial, None)
        if exposure is None:
            return None
        if exposure.revoking is not None:
            exposure.revoking.cancel()
        self._endpoint.release(exposure.region)
        return exposure.posting

    def clear(self) -> None:
        """Forget all; the endpoint was closed, and their regions with it."""
        for exposure in self._exposed.values():
            if exposure.revoking is not None:
                exposure.revoking.cancel()
        self._exposed.clear()
