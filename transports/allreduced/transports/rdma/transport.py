"""The transports ``rdma`` (RDMA or no link) and ``auto`` (RDMA where both ends reach each other by it, else TCP)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import ClassVar

from allreduced.core.errors import ConfigError, ProtocolError
from allreduced.transports.base import Link, LinkAccepted, LinkEvents, LinkOptions, Listener, Transport
from allreduced.transports.rdma.agreement import RdmaNegotiator
from allreduced.transports.rdma.verbs import load
from allreduced.transports.rdma.verbs_port import Verbs
from allreduced.transports.tcp.conversation import Conversation
from allreduced.transports.tcp.dial import finish_over_tcp, open_control, streams_of_a_link, unavailable
from allreduced.transports.tcp.link import FlowLink
from allreduced.transports.tcp.listener import listen

_log = logging.getLogger("allreduced.transports.rdma")


class _NegotiatingTransport(Transport):
    """Dials and listens by TCP, and lets the two ends of each link agree on how its data goes."""

    required: ClassVar[bool]

    def __init__(self, verbs: Callable[[], Verbs] = load) -> None:
        self._verbs = verbs
        self._negotiator = RdmaNegotiator(verbs, required=self.required)

    async def listen(self, address: str, accepted: LinkAccepted, options: LinkOptions) -> Listener:
        if self.required and not self._verbs().devices():
            raise ConfigError(
                f"cannot listen at {address}: this machine has no RDMA device",
                hint="`rdma link show` lists them; or set the transport to auto or tcp",
            )
        return await listen(address, accepted, options, self.scheme, self._negotiator)

    async def connect(self, address: str, events: LinkEvents, options: LinkOptions) -> Link:
        async with streams_of_a_link() as streams:
            opened = await open_control(address, options, streams, self.scheme)
            conversation = Conversation(opened.stream)
            link: FlowLink
            try:
                async with asyncio.timeout(options.handshake_timeout):
                    made = await self._negotiator.offer(opened, conversation)
            except ProtocolError as error:
                raise ProtocolError(f"{address}: {error.message}", hint=error.hint) from error
            except OSError as error:  # TimeoutError is one
                unavailable(address, error)
            if isinstance(made, FlowLink):
                link = made
            else:
                conversation.end()
                link = await finish_over_tcp(opened, streams)
                link.fallback_reason = made
        link.start(events)
        return link


class RdmaTransport(_NegotiatingTransport):
    """``rdma://host:port``."""

    scheme: ClassVar[str] = "rdma"
    required: ClassVar[bool] = True


class AutoTransport(_NegotiatingTransport):
    """``auto://host:port``."""

    scheme: ClassVar[str] = "auto"
    required: ClassVar[bool] = False
