"""Control frames between agents, over the control flow of a link.

A frame is a fixed binary header (magic, version, type, generation, group, body length) and a msgpack body. The
transport carries a frame as opaque bytes of known length. Tensor data does not travel here, see ``transports.base``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from allreduced.core.errors import WireError
from allreduced.core.identity import GroupKey, Member

MAX_FRAME = 1 << 20
"""Bytes that one control frame may have at most."""


# Any time


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent when nothing else was for a while; any frame counts as a sign of life."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The sender is going to stop; its operations are done. The link closes after it."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeerTable:
    """Agents that the sender knows, as (node, address); the receiver dials those that it does not know."""

    peers: tuple[tuple[str, str], ...]


# Membership


@dataclass(frozen=True, slots=True)
class Announce:
    """A client of the sender waits for the group. ``client``: 64-bit random, names this claim to the rank."""

    key: GroupKey
    size: int
    rank: int
    client: int
    pid: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class Retract:
    """The claim announced as ``client`` waits no more (process ended, deadline passed, refused, its group formed)."""

    key: GroupKey
    client: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The claim ``client`` of the receiver's cannot be served; its client gets the error."""

    key: GroupKey
    client: int
    error: WireError


@dataclass(frozen=True, slots=True)
class Form:
    """The group is to have exactly these members; proposed by the agent that holds rank 0.

    Each member whose claims still wait sends the same frame to all other members, as its consent. A member admits its
    clients when it has the consent of every other one, so no group ever holds a process that was already gone.
    ``clients[i]`` is the claim that holds rank ``i``. ``tile_bytes`` holds for all members.
    """

    key: GroupKey
    group: int
    generation: int
    tile_bytes: int
    members: tuple[Member, ...]
    clients: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """The group can run nothing more, for this error, on any member.

    ``generation`` 0: the sender has not admitted its clients; claims of members that have not either wait again.
    """

    group: int
    generation: int
    error: WireError


@dataclass(frozen=True, slots=True)
class Left:
    """Ranks left the group on purpose; what they submitted before stays valid."""

    group: int
    generation: int
    ranks: tuple[int, ...]


# Operations. Every frame names (group, generation, name, use).


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must agree between ranks. ``shape``: see ``local.Submit``; ``root``: -1 where the kind has none."""

    kind: str
    dtype: int
    op: int
    shape: str
    count: int
    root: int
    algorithm: str


@dataclass(frozen=True, slots=True)
class Grant:
    """A posted receive of the sender's: tiles ``first … first+tiles-1`` of ``block`` in ``step`` may be sent into it.

    ``receive`` names it on the sender's side; ``token`` is the transport's (filled in by the driver).
    """

    receive: int
    step: int
    block: int
    first: int
    tiles: int
    token: bytes


@dataclass(frozen=True, slots=True)
class Ready:
    """All local ranks of the sender arrived, its memory is reserved, and these receives are posted for the receiver.

    ``attempt`` grows with every READY after a withdrawal. ``stamp`` is the place in the agreed order, as
    (negative priority, lamport time, index of the member with the lowest rank), or empty where not known yet.
    """

    group: int
    generation: int
    name: str
    use: int
    attempt: int
    fingerprint: Fingerprint
    stamp: tuple[int, ...]
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class MoreGrants:
    """Further receives of an operation whose READY was sent."""

    group: int
    generation: int
    name: str
    use: int
    attempt: int
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take back the READY of ``attempt``, to free its memory for an operation that comes earlier in the order."""

    group: int
    generation: int
    name: str
    use: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Answer to Withdraw. Not ``accepted``: the sender has begun to send data, the memory must stay."""

    group: int
    generation: int
    name: str
    use: int
    attempt: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class Queued:
    """The operation waits for memory at the sender, which holds the lowest rank; ``stamp`` as in Ready."""

    group: int
    generation: int
    name: str
    use: int
    stamp: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrived:
    """These ranks of the sender submitted the operation, others of it are late; sent only when it takes long."""

    group: int
    generation: int
    name: str
    use: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """The operation ended with this error at the sender and must end so everywhere."""

    group: int
    generation: int
    name: str
    use: int
    error: WireError


MembershipFrame: TypeAlias = "Announce | Retract | Refuse | Form | Broken | Left"
OperationFrame: TypeAlias = "Ready | MoreGrants | Withdraw | Withdrawn | Queued | Arrived | Abort"
Frame: TypeAlias = "Heartbeat | Goodbye | PeerTable | MembershipFrame | OperationFrame"
