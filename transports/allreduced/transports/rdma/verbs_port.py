"""What the RDMA transport asks of verbs: plain data, and a small interface that ``verbs`` implements on pyverbs.

Tests put a fake in its place. No call blocks but for ``QueuePair.connect``; nothing here knows an event loop. Sizes are
bytes, MTUs too.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

GidKind: TypeAlias = Literal["ib", "roce_v1", "roce_v2"]
LinkLayer: TypeAlias = Literal["infiniband", "ethernet", "unknown"]
PortState: TypeAlias = Literal["down", "init", "armed", "active", "unknown"]

MTUS: Final = (256, 512, 1024, 2048, 4096)
"""The path MTUs that there are."""


@dataclass(frozen=True, slots=True)
class GidEntry:
    """One entry of a port's table of GIDs. ``gid``: 16 bytes, for RoCE an IPv6 or an IPv4-mapped address."""

    index: int
    gid: bytes
    kind: GidKind
    interface: str = ""
    """The network interface that the entry belongs to, where that is known."""


@dataclass(frozen=True, slots=True)
class PortInfo:
    """One port of a device."""

    number: int
    state: PortState
    link_layer: LinkLayer
    active_mtu: int
    max_message: int
    lid: int
    gids: tuple[GidEntry, ...]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device as it was found. ``problem``: why it cannot be opened (empty: it can); then the rest may be 0."""

    name: str
    ports: tuple[PortInfo, ...]
    max_queue_pairs: int = 0
    max_work_requests: int = 0
    max_completions: int = 0
    max_regions: int = 0
    max_region_size: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LocalPort:
    """The device, port and GID that one link uses at this end; what ``devices.choose`` returns."""

    device: str
    port: int
    link_layer: LinkLayer
    gid: GidEntry
    lid: int
    mtu: int
    """The largest that port and options allow; both ends use the smaller of theirs."""
    max_message: int


@dataclass(frozen=True, slots=True)
class PathTo:
    """How one queue pair reaches its other end; the remote GID, LID and number come of the negotiation."""

    local: LocalPort
    mtu: int
    remote_gid: bytes
    remote_lid: int
    remote_pair: int
    local_psn: int
    remote_psn: int
    timeout: int
    retry_count: int
    rnr_retry: int
    traffic_class: int
    service_level: int
    hop_limit: int


class SendKind(enum.Enum):
    """What a send request does."""

    SEND = enum.auto()
    WRITE_WITH_IMMEDIATE = enum.auto()


@dataclass(slots=True)
class SendRequest:
    """One work request of a send queue. Memory is described by address, length and local key."""

    identifier: int
    kind: SendKind
    address: int
    length: int
    key: int
    signalled: bool = True
    solicited: bool = True
    """Whether the other end is woken."""
    inline: bool = False
    """The bytes are taken within the call; the key does not matter then."""
    remote_address: int = 0
    remote_key: int = 0
    immediate: int = 0
    """Unsigned 32 bits."""


@dataclass(slots=True)
class ReceiveRequest:
    """One work request of a receive queue."""

    identifier: int
    address: int
    length: int
    key: int


class CompletionKind(enum.Enum):
    """What was completed."""

    SENT = enum.auto()
    RECEIVED = enum.auto()
    """A SEND of the peer is in the memory of a receive request."""
    WRITTEN = enum.auto()
    """An RDMA WRITE with immediate of the peer landed; it used up a receive request."""


@dataclass(slots=True)
class Completion:
    """One entry of a completion queue. Where ``error`` is not empty only identifier, pair and ``flushed`` hold."""

    identifier: int
    kind: CompletionKind
    pair: int
    """Number of the queue pair."""
    length: int = 0
    immediate: int = 0
    error: str = ""
    """What went wrong in the words of the verbs interface; empty: nothing."""
    flushed: bool = False
    """Only given back because the queue pair had failed before."""


class AsyncKind(enum.Enum):
    """What an asynchronous event of a device says."""

    PORT_DOWN = enum.auto()
    DEVICE_GONE = enum.auto()
    PAIR_FAILED = enum.auto()
    QUEUE_FAILED = enum.auto()
    OTHER = enum.auto()
    """Nothing that ends a link."""


@dataclass(frozen=True, slots=True)
class AsyncNews:
    """One asynchronous event; ``text`` names it as the verbs interface does. Which port it is about is not told."""

    kind: AsyncKind
    text: str


class VerbsError(Exception):
    """A verb failed. ``errno`` is 0 where it is not known."""

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno


class Closable(Protocol):
    """What must be closed, once; a second call does nothing."""

    def close(self) -> None:
        """Give it back to the device. Nothing touches the memory that belongs to it when this returns.

        :raises VerbsError: the device refused, for instance because something that depends on it is still open.
        """


class Region(Closable, Protocol):
    """A registered memory region."""

    @property
    def local_key(self) -> int:
        """Key for requests of this end."""

    @property
    def remote_key(self) -> int:
        """Key for writes of the other end; worth nothing unless registered with ``remote_write``."""


class CompletionQueue(Closable, Protocol):
    """A completion queue with a channel of its own."""

    @property
    def descriptor(self) -> int:
        """Readable when an event came since ``arm``."""

    def arm(self, *, solicited_only: bool = False) -> None:
        """Ask for one event for the next completion (or the next solicited or failed one). Poll once afterwards."""

    def take_event(self) -> None:
        """Take and acknowledge one event; only where the descriptor is readable, else it blocks."""

    def poll(self, most: int) -> list[Completion]:
        """Return up to ``most`` completions, oldest first."""


class QueuePair(Closable, Protocol):
    """A reliable connected queue pair. Requests of one queue complete in order."""

    @property
    def number(self) -> int:
        """24 bits that name it at its device."""

    @property
    def max_inline(self) -> int:
        """Bytes that a send request may carry inline."""

    def connect(self, path: PathTo) -> None:
        """Bring it from reset to ready to send.

        May take a second where it fails: the kernel looks for the hardware address of the remote GID meanwhile.

        :raises VerbsError: the GID cannot be reached, or something of the path cannot be.
        """

    def post_send(self, requests: Sequence[SendRequest]) -> None:
        """Post requests as one chain.

        :raises VerbsError: the queue is full, or the pair is not ready; none, or only the first of them, were posted.
        """

    def post_receive(self, requests: Sequence[ReceiveRequest]) -> None:
        """Post receive requests as one chain; from the start on, also before ``connect``.

        :raises VerbsError: as ``post_send``.
        """


class Domain(Closable, Protocol):
    """A protection domain: keys of one reach nothing of another."""

    def register(self, address: int, length: int, *, local_write: bool, remote_write: bool) -> Region:
        """Register memory, which the caller keeps alive until the region is closed.

        :raises VerbsError: the limit for locked memory is too low, the device's limits are reached, or bad memory.
        """

    def create_pair(
        self,
        sends: CompletionQueue,
        receives: CompletionQueue,
        *,
        send_depth: int,
        receive_depth: int,
        max_inline: int,
        port: int,
    ) -> QueuePair:
        """Make a queue pair; its receive queue takes requests at once. ``max_inline`` is a wish.

        :raises VerbsError: a limit of the device is reached.
        """


class Device(Closable, Protocol):
    """An open device."""

    @property
    def descriptor(self) -> int:
        """Readable while an asynchronous event waits."""

    def take_news(self) -> AsyncNews:
        """Take and acknowledge one asynchronous event; only where the descriptor is readable, else it blocks."""

    def is_active(self, port: int) -> bool:
        """Tell whether a port is up.

        :raises VerbsError: the device does not tell.
        """

    def is_removed(self) -> bool:
        """Tell whether the device is being removed, which not every driver tells by an event. Cheap."""

    def create_domain(self) -> Domain:
        """Make a protection domain."""

    def create_queue(self, depth: int) -> CompletionQueue:
        """Make a completion queue of ``depth`` entries, with a channel of its own."""


class Verbs(Protocol):
    """The verbs of this machine."""

    def devices(self) -> Sequence[DeviceInfo]:
        """Return all devices with their ports and GIDs as they are now; empty where there is none."""

    def open(self, name: str) -> Device:
        """Open a device.

        :raises VerbsError: there is none of that name, or this process may not use it.
        """
