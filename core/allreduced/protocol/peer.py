"""Control frames between agents, over the control flow of a link.

A frame is a fixed binary header (magic, version, type, generation, group, body length) and a msgpack body. The
transport carries a frame as opaque bytes of known length. Tensor data does not travel here, see ``transports.base``.
Frames about changes of a group's generation are in ``change``.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from allreduced.core.errors import InternalError, ProtocolError, WireError
from allreduced.core.identity import GroupKey, Members
from allreduced.core.limits import (
    U8,
    U32,
    AtMost,
    Count,
    Duration,
    Id,
    Ids,
    Name,
    Rank,
    RankOrNone,
    Ranks,
    ShapeText,
    Signed,
    Size,
    Text,
    Word,
)
from allreduced.protocol.change import (
    MAX_FORGET,
    Accept,
    Accepted,
    ChangeFrame,
    Committed,
    Prepare,
    Promise,
    Trouble,
    Uses,
)
from allreduced.protocol.codec import ADDED_LATER, Codec
from allreduced.protocol.job_secret import NO_SECRET, Digest
from allreduced.protocol.status import AgentReport

MAX_FRAME = 1 << 20
"""Bytes that one control frame may have at most."""

MAX_PEERS = 1 << 13
"""Agents that one :class:`PeerTable` tells at most."""

MAX_LOAD = 512 << 10
"""Bytes of data that one :class:`Load` carries at most."""

MAX_GRANTS = 1 << 14
"""Grants of one frame at most."""

MAX_ADDRESS = 512
"""Bytes of an agent's address at most."""

MAX_TOKEN = 256
"""Bytes of a transport's token for a posted receive at most."""

MAX_CALLS = 16
"""Different calls of one operation that one :class:`Differs` tells at most."""

Peers: TypeAlias = Annotated[tuple[tuple[Name, Annotated[str, AtMost(MAX_ADDRESS)]], ...], AtMost(MAX_PEERS)]
Stamp: TypeAlias = Annotated[tuple[Signed, ...], AtMost(8)]
Token: TypeAlias = Annotated[bytes, AtMost(MAX_TOKEN)]
Names: TypeAlias = Annotated[tuple[Name, ...], AtMost(MAX_FORGET)]
LoadData: TypeAlias = Annotated[bytes, AtMost(MAX_LOAD)]

# Any time


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent when nothing else was for a while; any frame counts as a sign of life."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The sender is going to stop; its operations are done. The link closes after it."""

    reason: Text


@dataclass(frozen=True, slots=True)
class PeerTable:
    """Agents that the sender knows, as (node, address); the receiver dials those that it does not know.

    ``failure_timeout``: of the sender, which must hear of the receiver several times in it; 0 where it is not told.
    """

    peers: Peers
    failure_timeout: Duration = field(default=0.0, metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Tell what the user ``uid`` may know of what runs at the receiver; it answers by a Status.

    ``probe``: as in ``local.AskStatus``.
    """

    request: Id
    uid: U32
    probe: U8 = field(default=0, metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True)
class Status:
    """Answer to StatusRequest."""

    request: Id
    report: AgentReport


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes that are sent to see how fast the link is; answered by a Loaded."""

    number: Id
    data: LoadData


@dataclass(frozen=True, slots=True)
class Loaded:
    """A Load came in."""

    number: Id


# Membership


@dataclass(frozen=True, slots=True)
class Announce:
    """A client of the sender waits for the group. ``client``: 64-bit random, names this claim to the rank.

    ``proof``: of its job secret, see ``job_secret``; claims whose proofs differ never meet.
    """

    key: GroupKey
    size: Size
    rank: Rank
    client: Id
    pid: U32
    local_rank: Rank
    proof: Digest = field(default=NO_SECRET, metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True)
class Retract:
    """The claim announced as ``client`` waits no more (process ended, deadline passed, refused, its group formed)."""

    key: GroupKey
    client: Id
    proof: Digest = field(default=NO_SECRET, metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True)
class Refuse:
    """The claim ``client`` of the receiver's cannot be served; its client gets the error.

    ``client`` 0, with ``mismatch``: the ranks that the error names were refused; those that would wait for them are.
    """

    key: GroupKey
    client: Id
    error: WireError
    proof: Digest = field(default=NO_SECRET, metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True)
class Form:
    """The group is to have exactly these members; proposed by the agent that holds rank 0.

    Each member whose claims still wait sends the same frame to all other members, as its consent. A member admits its
    clients when it has the consent of every other one, so no group ever holds a process that was already gone.
    ``clients[i]`` is the claim that holds rank ``i``. ``tile_bytes`` holds for all members.
    """

    key: GroupKey
    group: Id
    generation: U32
    tile_bytes: Count
    members: Members
    clients: Ids
    proof: Digest = field(default=NO_SECRET, metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True)
class Broken:
    """The group can run nothing more, for this error, on any member.

    ``generation`` 0: the sender has not admitted its clients; claims of members that have not either wait again.
    """

    group: Id
    generation: U32
    error: WireError


@dataclass(frozen=True, slots=True)
class Left:
    """Ranks left the group on purpose; what they submitted before stays valid."""

    group: Id
    generation: U32
    ranks: Ranks


# Operations. Every frame names (group, generation, name, use).


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must agree between ranks. ``shape``: see ``local.Submit``; ``root``: -1 where the kind has none."""

    kind: Word
    dtype: U8
    op: U8
    shape: ShapeText
    count: Count
    root: RankOrNone
    algorithm: Word


@dataclass(frozen=True, slots=True)
class Grant:
    """A posted receive of the sender's: tiles ``first … first+tiles-1`` of ``block`` in ``step`` may be sent into it.

    ``receive`` names it on the sender's side; ``token`` is the transport's (filled in by the driver).
    """

    receive: Id
    step: U32
    block: U32
    first: Count
    tiles: Count
    token: Token


Grants: TypeAlias = Annotated[tuple[Grant, ...], AtMost(MAX_GRANTS)]


@dataclass(frozen=True, slots=True)
class Ready:
    """All local ranks of the sender arrived, its memory is reserved, and these receives are posted for the receiver.

    ``attempt`` grows with every READY after a withdrawal. ``stamp`` is the place in the agreed order, as
    (negative priority, lamport time, index of the member with the lowest rank), or empty where not known yet.
    ``serial``: how many-th operation of the group this is for which the sender was ready.
    ``confirms``: as in Confirm.
    """

    group: Id
    generation: U32
    name: Name
    use: Id
    attempt: U32
    fingerprint: Fingerprint
    stamp: Stamp
    grants: Grants
    serial: Id = 0
    confirms: Ids = ()


@dataclass(frozen=True, slots=True)
class MoreGrants:
    """Further receives of an operation whose READY was sent."""

    group: Id
    generation: U32
    name: Name
    use: Id
    attempt: U32
    grants: Grants


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take back the READY of ``attempt``, to free its memory for an operation that comes earlier in the order."""

    group: Id
    generation: U32
    name: Name
    use: Id
    attempt: U32


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Answer to Withdraw. Not ``accepted``: the sender has begun to send data, the memory must stay."""

    group: Id
    generation: U32
    name: Name
    use: Id
    attempt: U32
    accepted: bool


@dataclass(frozen=True, slots=True)
class Queued:
    """All local ranks of the sender arrived, but it waits for memory; ``stamp`` as in Ready. Sent once at most."""

    group: Id
    generation: U32
    name: Name
    use: Id
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Arrived:
    """These ranks of the sender submitted the operation, others of it are late; sent only when it takes long."""

    group: Id
    generation: U32
    name: Name
    use: Id
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class Call:
    """Ranks of the sender that called the operation in one way."""

    fingerprint: Fingerprint
    ranks: Ranks


Calls: TypeAlias = Annotated[tuple[Call, ...], AtMost(MAX_CALLS)]


@dataclass(frozen=True, slots=True)
class Differs:
    """Ranks called the operation differently. ``calls`` says what ranks of the sender called, as far as they came.

    Sent again when more of them come, so that every rank gets the same error, which names all. Where one node has more
    different calls than fit, it tells the first of them.
    """

    group: Id
    generation: U32
    name: Name
    use: Id
    calls: Calls


@dataclass(frozen=True, slots=True)
class Abort:
    """The sender's last word on the operation: it must end with this error.

    ``final``: the sender was never ready, so nobody can have a result; the operation has ended so everywhere. Else a
    member may have delivered it already: the sender delivers it no more, unless another one's word is Kept. It has
    failed when every member has said Abort.
    """

    group: Id
    generation: U32
    name: Name
    use: Id
    error: WireError
    final: bool = True


@dataclass(frozen=True, slots=True)
class Kept:
    """The sender's last word on the operation, after an Abort came: it has delivered it, so every member must."""

    group: Id
    generation: U32
    name: Name
    use: Id


@dataclass(frozen=True, slots=True)
class Fetch:
    """After a change: send the kept result of this operation, whole, into the receive of ``grants`` (exactly one)."""

    group: Id
    generation: U32
    name: Name
    use: Id
    grants: Grants


@dataclass(frozen=True, slots=True)
class Confirm:
    """The sender has delivered the operations that have these ``serials`` in READYs of the receiver's.

    ``everything``: also all results that were agreed in the change to this generation.
    """

    group: Id
    generation: U32
    serials: Ids
    everything: bool


# Names of operations


@dataclass(frozen=True, slots=True)
class Forget:
    """Proposal of the first member: no longer count the uses of these names, each of which was used ``uses[i]`` times.

    ``round`` counts the proposals of a group. Until its round is decided, the sender uses none of the names.
    """

    group: Id
    generation: U32
    round: U32
    names: Names
    uses: Uses


@dataclass(frozen=True, slots=True)
class Forgettable:
    """Answer to Forget, sent to all other members. ``refused``: places of the names that the sender still needs.

    It needs a name that it has in use, or whose uses it has counted otherwise. The others it does not use until the
    round is decided: when a member has the answers of all others, it drops the names that nobody refused, and their
    next use is number 0.
    """

    group: Id
    generation: U32
    round: U32
    refused: Uses


MembershipFrame: TypeAlias = "Announce | Retract | Refuse | Form | Broken | Left | ChangeFrame"
OperationFrame: TypeAlias = (
    "Ready | MoreGrants | Withdraw | Withdrawn | Queued | Arrived | Differs | Abort | Kept | Fetch"
)
NamesFrame: TypeAlias = "Forget | Forgettable"
EngineFrame: TypeAlias = "OperationFrame | NamesFrame | Confirm"
StatusFrame: TypeAlias = "StatusRequest | Status"
LoadFrame: TypeAlias = "Load | Loaded"
Frame: TypeAlias = "Heartbeat | Goodbye | PeerTable | StatusFrame | LoadFrame | MembershipFrame | EngineFrame"

# Bytes

CODES: Mapping[type, int] = {
    Heartbeat: 1,
    Goodbye: 2,
    PeerTable: 3,
    StatusRequest: 4,
    Status: 5,
    Load: 6,
    Loaded: 7,
    Announce: 16,
    Retract: 17,
    Refuse: 18,
    Form: 19,
    Broken: 20,
    Left: 21,
    Trouble: 24,
    Prepare: 25,
    Promise: 26,
    Accept: 27,
    Accepted: 28,
    Committed: 29,
    Ready: 32,
    MoreGrants: 33,
    Withdraw: 34,
    Withdrawn: 35,
    Queued: 36,
    Arrived: 37,
    Abort: 38,
    Differs: 39,
    Kept: 40,
    Fetch: 41,
    Confirm: 42,
    Forget: 48,
    Forgettable: 49,
}
"""The type code of each frame, in its header. They never change."""

MAGIC = b"ARD1"
VERSION = 1

HEADER = struct.Struct("<4sBBHIQI")
"""Magic, version, type code, 0, generation, group, body length; little-endian, 24 bytes."""


class _Kind:
    """How one class of frames is told."""

    def __init__(self, cls: type[Frame], code: int) -> None:
        names = tuple(field.name for field in dataclasses.fields(cls))
        self.code = code
        self.name = cls.__name__
        self.grouped = "group" in names
        self.codec: Codec[Frame] = Codec(cls, code=None, outside=("group", "generation") if self.grouped else ())


SINCE: Mapping[type, int] = {Load: 2, Loaded: 2}
"""The version of the agents' protocol (``handshake``) that each frame came with, where that is not the first one."""


def is_known(frame: Frame, version: int) -> bool:
    """Return whether an agent that speaks this version knows the frame. One that does not ends its link over it."""
    return SINCE.get(type(frame), 1) <= version


_KINDS: Mapping[type, _Kind] = {cls: _Kind(cls, code) for cls, code in CODES.items()}
_BY_CODE = {kind.code: kind for kind in _KINDS.values()}


def encode(frame: Frame) -> bytes:
    """Return the frame as it goes over the control flow: header and body.

    :raises InternalError: it is too long or cannot be told; callers keep to the limits of the fields.
    """
    kind = _KINDS[type(frame)]
    body = kind.codec.pack(frame)
    if HEADER.size + len(body) > MAX_FRAME:
        raise InternalError(f"{kind.name} has {HEADER.size + len(body)} bytes, at most {MAX_FRAME} can be sent")
    group: int = getattr(frame, "group", 0)
    generation: int = getattr(frame, "generation", 0)
    return HEADER.pack(MAGIC, VERSION, kind.code, 0, generation, group, len(body)) + body


def decode(payload: bytes | bytearray | memoryview) -> Frame:
    """Return the frame that came over the control flow.

    :raises ProtocolError: anything about it is wrong.
    """
    if not HEADER.size <= len(payload) <= MAX_FRAME:
        raise ProtocolError(f"a frame has {len(payload)} bytes, {HEADER.size} to {MAX_FRAME} are allowed")
    magic, version, code, reserved, generation, group, length = HEADER.unpack_from(payload)
    if magic != MAGIC:
        raise ProtocolError(f"a frame begins with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise ProtocolError(f"a frame has version {version}, this agent speaks {VERSION}")
    kind = _BY_CODE.get(code)
    if kind is None:
        raise ProtocolError(f"frame type {code} is not known")
    if reserved != 0:
        raise ProtocolError(f"{kind.name}: the reserved field of the header is {reserved}, it must be 0")
    if length != len(payload) - HEADER.size:
        raise ProtocolError(
            f"{kind.name}: the header tells {length} bytes of body, there are {len(payload) - HEADER.size}"
        )
    body = memoryview(payload)[HEADER.size :]
    if kind.grouped:
        return kind.codec.unpack(body, group, generation)
    if group != 0 or generation != 0:
        raise ProtocolError(
            f"{kind.name}: group and generation of the header must be 0, they are {group}, {generation}"
        )
    return kind.codec.unpack(body)
