"""A listening address without a socket."""

from __future__ import annotations

from allreduced.transports.base import Listener


class Bound(Listener):
    """A listener that listens nowhere."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def close(self) -> None:
        """Do nothing."""
