"""Decides, with the other end, which way the data of an accepted link takes: by TCP, or by another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from allreduced.transports.base import Handshake, LinkOptions
from allreduced.transports.tcp.conversation import Conversation, decline
from allreduced.transports.tcp.link import FlowLink
from allreduced.transports.tcp.stream import Stream


@dataclass(frozen=True, slots=True)
class Accepted:
    """A link that is being made here: its control flow is authenticated, its data flows are missing."""

    stream: Stream
    control: Handshake
    local_host: str
    """The numeric address through which the peer reached this agent."""
    local: str
    remote: str
    options: LinkOptions


class Negotiator(Protocol):
    """Makes links whose data goes another way than by TCP."""

    @property
    def required(self) -> bool:
        """True where links with data flows over TCP are refused."""

    async def answer(self, accepted: Accepted, conversation: Conversation) -> FlowLink | str:
        """Answer a dialler that asks for another way. Return the link, not started, or why the data goes by TCP.

        The dialler was told then. The timeout of handshakes bounds it.

        :raises AllReducedError: the link is refused.
        """


class TcpOnly:
    """What an agent says that knows no other way, or does not want one."""

    required = False

    async def answer(self, accepted: Accepted, conversation: Conversation) -> FlowLink | str:  # noqa: D102 - see Negotiator
        await conversation.receive()
        await conversation.send(decline("the other end uses TCP only"))
        return ""
