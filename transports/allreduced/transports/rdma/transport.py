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
        try:
            link = await self._agree(address, options)
        except _Unanswered as error:
            if self.required:
                unavailable(address, error.cause)
            link = await self._plain(address, options)
        link.start(events)
        return link

    async def _agree(self, address: str, options: LinkOptions) -> FlowLink:
        """Dial, and return the link of the kind that was agreed on, not started."""
        async with streams_of_a_link() as streams:
            opened = await open_control(address, options, streams, self.scheme)
            conversation = Conversation(opened.stream)
            try:
                async with asyncio.timeout(options.handshake_timeout):
                    made = await self._negotiator.offer(opened, conversation)
            except ProtocolError as error:
                raise ProtocolError(f"{address}: {error.message}", hint=error.hint) from error
            except OSError as error:  # TimeoutError is one
                raise _Unanswered(error) from error
            if isinstance(made, FlowLink):
                return made
            conversation.end()
            link = await finish_over_tcp(opened, streams)
            link.fallback_reason = made
            return link

    async def _plain(self, address: str, options: LinkOptions) -> FlowLink:
        """Dial once more, as somebody who knows TCP only: so does an agent of an earlier version at the other end."""
        async with streams_of_a_link() as streams:
            opened = await open_control(address, options, streams, self.scheme)
            link = await finish_over_tcp(opened, streams)
        link.fallback_reason = "the other end did not answer the offer of RDMA"
        return link


class _Unanswered(Exception):
    """The connection ended, or nothing more came, in the middle of the negotiation."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class RdmaTransport(_NegotiatingTransport):
    """``rdma://host:port``."""

    scheme: ClassVar[str] = "rdma"
    required: ClassVar[bool] = True


class AutoTransport(_NegotiatingTransport):
    """``auto://host:port``."""

    scheme: ClassVar[str] = "auto"
    required: ClassVar[bool] = False
