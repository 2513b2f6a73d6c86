"""The contract of links between agents. ``inproc`` is its reference; every transport passes ``tests/contract``.

A link has one control flow (ordered, small frames) and one or more data flows. Everything runs on one event loop:
methods and callbacks are called on its thread, no method blocks, and no callback is called from inside the method
call that causes it. Data never lands in memory that was not posted for it.
"""

from __future__ import annotations

import abc
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeAlias

from allreduced.core.channel import Channel
from allreduced.core.errors import AgentUnavailable, AllReducedError
from allreduced.core.identity import PeerIdentity as PeerIdentity  # also by this name: part of this contract
from allreduced.transports.rdma.options import RdmaOptions


@dataclass(slots=True)
class LinkStats:
    """Counters of one link since it was made; bytes are payload."""

    control_sent: int = 0
    control_received: int = 0
    frames_sent: int = 0
    frames_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    frames_unclaimed: int = 0
    """Data frames for receives that are not posted any more: read and dropped."""
    bytes_copied: int = 0
    """Payload that this process copied between the owner's memory and buffers of the link (RDMA: small frames)."""
    completion_events: int = 0
    """How often a completion channel woke the loop (RDMA)."""


class LinkEvents(abc.ABC):
    """What a link tells its owner. Exceptions raised here are the owner's defect and abort the link."""

    @abc.abstractmethod
    def control_received(self, link: Link, payload: bytes) -> None:
        """Take one control frame, exactly as ``send_control`` got it, in order."""

    @abc.abstractmethod
    def received(self, link: Link, receive: int, offset: int, nbytes: int, tag: int) -> None:
        """Take note that ``nbytes`` landed at ``offset`` of the posted receive; pieces come in any order, each once."""

    @abc.abstractmethod
    def receive_cancelled(self, link: Link, receive: int) -> None:
        """Take back the memory of a cancelled receive: nothing can land in it any more."""

    @abc.abstractmethod
    def sent(self, link: Link, send: int) -> None:
        """Take back the memory of a send (complete or cancelled): nothing reads it any more."""

    @abc.abstractmethod
    def closed(self, link: Link, error: AllReducedError | None) -> None:
        """Take the last callback of a link; None after an orderly close. All its memory is free."""


class Link(abc.ABC):
    """An authenticated connection between two agents.

    After ``abort`` or a failure, ``receive_cancelled`` and ``sent`` come for everything outstanding, then ``closed``,
    once. Calls after that do nothing.
    """

    peer: PeerIdentity
    version: int
    """Of the agents' protocol, that both ends speak: what came with a later one is nothing to the other end."""
    initiator: bool
    """True where this end dialled."""
    remote_address: str
    """Address of the other end as seen here, ``scheme://host:port``."""
    local_address: str
    stats: LinkStats
    last_received: float
    """Loop time at which any byte last came in, on any flow."""
    data_path: str = ""
    """What carries the data, for people: the transport and what it uses, such as ``rdma rxe0 port 1``; empty: as the
    address says."""
    fallback_reason: str = ""
    """Why the data goes by TCP although RDMA was wanted where possible; empty: it was not wanted, or it is used."""

    @abc.abstractmethod
    def send_control(self, payload: bytes) -> None:
        """Queue one control frame (up to ``MAX_CONTROL`` bytes). Control frames never wait behind data.

        :raises ValueError: the payload is too long.
        """

    @abc.abstractmethod
    def post_receive(self, receive: int, buffer: memoryview) -> bytes:
        """Open writable ``buffer`` for data of this peer and return the token that the peer must send with.

        ``receive`` is the caller's number, unique per link while posted. The posting stays until every byte of the
        buffer was received once (it is then over without a further callback), or until it is cancelled. An empty one
        is over at once. The number may be posted again after that; frames for the old posting do not reach the new one.
        No other link gives the same token: one that outlives its link reaches nothing on the next.

        :raises ValueError: the number is in use, or the buffer is read-only.
        :raises TypeError: the buffer is not C-contiguous.
        """

    @abc.abstractmethod
    def cancel_receive(self, receive: int) -> None:
        """Close a posted receive. ``receive_cancelled`` follows, once nothing can land in the memory any more.

        Does nothing (no callback) for a receive that is not posted.
        """

    @abc.abstractmethod
    def send(
        self,
        send: int,
        token: bytes,
        offset: int,
        buffer: memoryview,
        *,
        tag: int = 0,
        priority: int = 0,
        share: int = 0,
    ) -> None:
        """Send ``buffer`` to ``offset`` (bytes) of the peer's posted receive that ``token`` names.

        It is cut into frames of at most ``max_frame`` bytes; data flows take the next frame when they are free:
        shares that have something to send get the same number of bytes, whatever their priorities; within a share
        higher priority first, sends of one priority in turns. The memory belongs to the link until ``sent``.
        ``share``: whose send it is, any number (agents give the uid that the group belongs to).
        ``tag``: unsigned 64 bits, carried in every frame's header for the receiver's checks. An empty buffer is sent at
        once. On a link that is being closed nothing is sent, only ``sent`` follows. A token that is none of this
        transport ends the link.

        :raises ValueError: the number is in use, or offset or tag do not fit into 64 bits.
        :raises TypeError: the buffer is not C-contiguous.
        """

    @abc.abstractmethod
    def cancel_send(self, send: int) -> None:
        """Stop a send; ``sent`` follows as soon as nothing reads the memory.

        Frames begun are completed with their true bytes (from a private copy), frames not begun are never sent.
        Does nothing for an unknown send.
        """

    @abc.abstractmethod
    def abort(self, error: AllReducedError) -> None:
        """End the link at once, whatever the peer does. ``closed`` follows with ``error``."""

    @abc.abstractmethod
    async def close(self, timeout: float) -> None:
        """Send everything queued, close in order, return when the peer has everything; abort after ``timeout`` s."""


MAX_CONTROL = 1 << 20
"""Bytes of one control frame at most."""

MAX_FRAME = 4 << 20
"""Bytes of one data frame at most. Every link takes frames up to here, whatever its own end sends (``max_frame``)."""


def is_refusal(error: AllReducedError) -> bool:
    """Tell whether ``connect`` raised ``error`` because the machine at the address said that nobody listens there.

    Then ``__cause__`` is a ConnectionRefusedError, and every address that the name stands for said so. Silence, a
    reset, a failed name look-up or a network that cannot be reached prove nothing.
    """
    return isinstance(error, AgentUnavailable) and isinstance(error.__cause__, ConnectionRefusedError)


LinkAccepted: TypeAlias = "Callable[[Link], LinkEvents]"
"""Called with each new authenticated incoming link; returns who gets its events. May raise to refuse it (aborted)."""


class Handshake(Protocol):
    """One side of the authentication of one flow, sans-IO. Transports run it before anything else on a connection."""

    def start(self) -> bytes:
        """Return the first bytes to send (empty for the side that listens first)."""

    def receive(self, data: bytes) -> bytes:
        """Take bytes in pieces of any size and return what to send, maybe nothing.

        :raises AuthenticationError: the other side does not have the secret.
        :raises ProtocolError: the bytes are not a handshake of a common version.
        """

    @property
    def refusal(self) -> bytes:
        """What to send before the connection is dropped, after ``receive`` raised. Empty: answer nothing."""

    @property
    def finished(self) -> bool:
        """True when both sides are satisfied; then the properties below hold."""

    @property
    def peer(self) -> PeerIdentity:
        """Who the other side proved to be."""

    @property
    def session(self) -> bytes:
        """16 bytes that name the link; all its flows share them."""

    @property
    def flow(self) -> int:
        """0 for the control flow, 1 … flows for data flows."""

    @property
    def flows(self) -> int:
        """How many data flows the link has."""

    @property
    def version(self) -> int:
        """The version of the protocol that both sides speak."""

    @property
    def trailing(self) -> bytes:
        """Bytes received behind the handshake; they belong to the flow."""


class Authenticator(Protocol):
    """Makes the handshakes of one agent; holds its identity and its secret.

    ``channel``: the encrypted connection that a handshake runs in, None for one that is not encrypted.
    """

    def dial(self, session: bytes, flow: int, flows: int, channel: Channel | None = None) -> Handshake:
        """Return the initiator's side for one flow of a link.

        ``session`` is empty for the control flow (flow 0), whose finished handshake then tells the session.
        """

    def answer(self, channel: Channel | None = None) -> Handshake:
        """Return the listener's side for one incoming connection."""


class Credentials(Protocol):
    """The certificate and the key of one agent, and whose certificates it accepts. They may change at any time."""

    def context(self, *, listening: bool) -> ssl.SSLContext:
        """Return what the next connection is encrypted with: TLS 1.3, asking for the other side's certificate."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What links of one agent are made with. Times in seconds, sizes in bytes.

    Nothing of it must be the same on both sides: ``flows`` is the dialler's choice, ``max_frame`` (up to ``MAX_FRAME``)
    that of each sender.
    """

    authenticator: Authenticator
    credentials: Credentials | None = None
    """Connections are encrypted where there are some; transports between processes of one machine need not."""
    flows: int = 2
    max_frame: int = 1 << 20
    connect_timeout: float = 5.0
    handshake_timeout: float = 5.0
    max_pending_handshakes: int = 64
    rdma: RdmaOptions = field(default_factory=RdmaOptions)
    """For the schemes ``rdma`` and ``auto``."""


class Listener(abc.ABC):
    """An open listening address."""

    address: str
    """Where it really listens, with the port that the system chose where 0 was asked for."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop accepting and drop unfinished handshakes; links made from it live on."""


class Transport(abc.ABC):
    """One way to connect agents, found by its scheme."""

    scheme: ClassVar[str]

    @abc.abstractmethod
    async def listen(self, address: str, accepted: LinkAccepted, options: LinkOptions) -> Listener:
        """Listen at ``scheme://host:port``.

        :raises ConfigError: the address is malformed, in use, or not of this machine; the message says which.
        """

    @abc.abstractmethod
    async def connect(self, address: str, events: LinkEvents, options: LinkOptions) -> Link:
        """Dial, authenticate, open all flows. Events may come before the caller runs again.

        :raises AgentUnavailable: nobody could be reached within the timeout; :func:`is_refusal` tells whether that
            proves that no agent is there.
        :raises AuthenticationError: the other side has another secret.
        :raises ProtocolError: the other side is no agent of a known version.
        """
