"""The TCP transport: what the registry finds under ``tcp``."""

from __future__ import annotations

from typing import ClassVar

from allreduced.transports.base import Link, LinkAccepted, LinkEvents, LinkOptions, Listener, Transport
from allreduced.transports.tcp.address import SCHEME
from allreduced.transports.tcp.dial import dial
from allreduced.transports.tcp.listener import listen


class TcpTransport(Transport):
    """``tcp://host:port``; IPv6 addresses in brackets."""

    scheme: ClassVar[str] = SCHEME

    async def listen(self, address: str, accepted: LinkAccepted, options: LinkOptions) -> Listener:  # noqa: D102
        return await listen(address, accepted, options)

    async def connect(self, address: str, events: LinkEvents, options: LinkOptions) -> Link:  # noqa: D102
        return await dial(address, events, options)
