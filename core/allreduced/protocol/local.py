"""Messages between a client and its node's agent, over a Unix stream socket.

A message is a little-endian ``u32`` body length and a msgpack array ``[type code, field, …]`` in the order of the
fields below. Messages with a descriptor (:data:`WITH_DESCRIPTOR`) carry exactly one, by ``SCM_RIGHTS``, sent with the
first byte of the message. ``request`` numbers are chosen by the client, unique per connection, and echoed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias, cast

from allreduced.core.errors import InternalError, ProtocolError, WireError
from allreduced.core.limits import (
    MAX_RANKS,
    U8,
    U16,
    U32,
    AtMost,
    Count,
    CountOrNone,
    Duration,
    Id,
    Name,
    Priority,
    Rank,
    RankOrNone,
    Ranks,
    ShapeText,
    Size,
    Word,
)
from allreduced.protocol.codec import ADDED_LATER, Codec
from allreduced.protocol.job_secret import NO_SECRET, Digest
from allreduced.protocol.status import AgentReport, Unanswered

LOWEST_VERSION = 1
HIGHEST_VERSION = 3

STATUS_VERSION = 2
"""The first version that has :class:`AskStatus`."""

SECRET_VERSION = 3
"""The first version in which :class:`Join` tells a job secret: earlier ones would ignore it."""

MAX_MESSAGE = 2 << 20
"""Bytes that the body of one message may have at most; larger tensors go by arena or in :class:`Upload` pieces."""

CHUNK = 1 << 20
"""Bytes of tensor data in one :class:`Upload` or :class:`Download` at most."""

MAX_LEASES = 1 << 16
"""Leases that one :class:`ReleaseLeases` gives back at most."""

Data: TypeAlias = Annotated[bytes, AtMost(CHUNK)]
Leases: TypeAlias = Annotated[tuple[Id, ...], AtMost(MAX_LEASES)]
Nodes: TypeAlias = Annotated[tuple[tuple[Name, Ranks], ...], AtMost(MAX_RANKS)]


# Client to agent


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a connection. ``shared_memory`` is false where the client cannot take descriptors."""

    lowest: U16
    highest: U16
    pid: U32
    shared_memory: bool


@dataclass(frozen=True, slots=True)
class Join:
    """Take ``rank`` of ``(job, group)`` with ``size`` ranks. Answered by Joined or RequestFailed.

    ``deadline``: seconds until the gathering is given up. ``default_deadline``: seconds for operations that name none,
    0 for the agent's own default. ``secret``: the digest of the job's secret, see ``job_secret``; since version 3.
    """

    request: Id
    job: Name
    group: Name
    rank: Rank
    size: Size
    local_rank: Rank
    deadline: Duration
    default_deadline: Duration
    secret: Digest = field(default=NO_SECRET, metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True)
class AllocateArena:
    """Ask for an input arena of ``nbytes``. Answered by ArenaGranted (with descriptor) or RequestFailed."""

    request: Id
    nbytes: Count


@dataclass(frozen=True, slots=True)
class ReleaseArena:
    """Give an input arena back. Operations that still read it finish first. Not answered."""

    arena: Count


@dataclass(frozen=True, slots=True)
class Submit:
    """Start an operation. Answered by Done or RequestFailed, exactly once.

    ``group``: the handle from Joined. ``kind``: ``all_reduce``, ``all_reduce_many``, ``broadcast``, ``barrier``.
    ``shape``: canonical text of the shape, ``(3, 4)``; for many tensors ``(3, 4);(5,)``, see ``shapes``.
    ``count``: elements. ``root``: -1 where the kind has none. ``deadline``: seconds, 0 for the group's default.
    ``algorithm``: empty for the agent's choice. The input is one of: ``payload`` (not None, up to the inline limit of
    Welcome); ``arena >= 0`` and ``offset`` in bytes; ``upload`` true, then Upload pieces follow; or nothing at all
    (barrier, a broadcast's non-root, count 0).
    ``inline_result``: send the result in the message or in Download pieces, whatever its size.
    """

    request: Id
    group: Id
    kind: Word
    name: Name
    dtype: U8
    op: U8
    shape: ShapeText
    count: Count
    root: RankOrNone
    priority: Priority
    deadline: Duration
    algorithm: Word
    payload: Data | None
    arena: CountOrNone
    offset: Count
    upload: bool
    inline_result: bool


@dataclass(frozen=True, slots=True)
class Upload:
    """A piece of the input of ``request``; pieces come in order and together make ``count`` elements."""

    request: Id
    data: Data


@dataclass(frozen=True, slots=True)
class ReleaseLeases:
    """Results under these leases are no longer read by the client. Not answered."""

    leases: Leases


@dataclass(frozen=True, slots=True)
class Leave:
    """This client leaves the group on purpose. Not answered."""

    group: Id


@dataclass(frozen=True, slots=True)
class AskStatus:
    """Tell what runs. Answered by one AgentStatus per agent and a StatusEnd, or by RequestFailed. Since version 2.

    Root and the agent's own user are told everything, others the details of their own groups only. ``others``: ask
    the other agents too. ``probe``: 1: each agent dials all others and tells whom it reaches; 2: and it measures, one
    agent after the other, how fast its links are.
    """

    request: Id
    others: bool
    probe: U8 = field(default=0, metadata=ADDED_LATER)


# Agent to client


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Hello. ``inline_limit``: bytes of a tensor that go inside Submit and Done at most.

    ``default_deadline``: seconds, for operations of groups that name none.
    """

    version: U16
    node: Name
    incarnation: Id
    inline_limit: Count
    default_deadline: Duration


@dataclass(frozen=True, slots=True)
class Refused:
    """The connection is refused for this error and closes after it."""

    error: WireError


@dataclass(frozen=True, slots=True)
class Joined:
    """The group is formed. ``nodes``: every node's name and ranks, by lowest rank; ``node`` indexes it.

    ``failure_timeout``: seconds by which an operation may end later than its deadline at most; 0 where the agent's
    version does not tell.
    """

    request: Id
    group: Id
    generation: U32
    rank: Rank
    size: Size
    node: Rank
    nodes: Nodes
    failure_timeout: Duration = field(default=0.0, metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True)
class ArenaGranted:
    """The input arena, mapped writable by this client only; carries the descriptor."""

    request: Id
    arena: Count
    nbytes: Count


@dataclass(frozen=True, slots=True)
class ResultArena:
    """A result arena of ``group``, mapped read-only; sent before the first Done that names it; has a descriptor."""

    arena: Count
    group: Id
    nbytes: Count


@dataclass(frozen=True, slots=True)
class ResultArenaGone:
    """No further Done names this arena; views that the client still has stay valid in its own mapping."""

    arena: Count


@dataclass(frozen=True, slots=True)
class Done:
    """The operation ended well.

    The result is one of: ``payload``; ``arena >= 0``, ``offset`` and ``nbytes`` under ``lease`` (to be released);
    ``pieces`` true, then Download pieces follow; nothing (barrier, count 0).
    ``participants``: ranks whose contributions are in it; empty means all of the group.
    ``elapsed``: seconds from this rank's submit to the end, at the agent.
    """

    request: Id
    payload: Data | None
    arena: CountOrNone
    offset: Count
    nbytes: Count
    lease: Id
    pieces: bool
    participants: Ranks
    algorithm: Word
    elapsed: Duration


@dataclass(frozen=True, slots=True)
class Download:
    """A piece of the result of ``request``; ``last`` marks the end."""

    request: Id
    data: Data
    last: bool


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request ended with this error."""

    request: Id
    error: WireError


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """The group can run nothing more; further submits get this error."""

    group: Id
    error: WireError


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """What one agent tells; the first one is that of the agent that was asked."""

    request: Id
    report: AgentReport


@dataclass(frozen=True, slots=True)
class StatusEnd:
    """All agents that answered were told. ``unanswered``: the others, as far as they are known."""

    request: Id
    unanswered: Unanswered


ToAgent: TypeAlias = "Hello | Join | AllocateArena | ReleaseArena | Submit | Upload | ReleaseLeases | Leave | AskStatus"
ToClient: TypeAlias = (
    "Welcome | Refused | Joined | ArenaGranted | ResultArena | ResultArenaGone | Done | Download | RequestFailed"
    " | GroupEnded | AgentStatus | StatusEnd"
)
WITH_DESCRIPTOR: tuple[type, ...] = (ArenaGranted, ResultArena)

# Bytes

CODES: Mapping[type, int] = {
    Hello: 1,
    Join: 2,
    AllocateArena: 3,
    ReleaseArena: 4,
    Submit: 5,
    Upload: 6,
    ReleaseLeases: 7,
    Leave: 8,
    AskStatus: 9,
    Welcome: 65,
    Refused: 66,
    Joined: 67,
    ArenaGranted: 68,
    ResultArena: 69,
    ResultArenaGone: 70,
    Done: 71,
    Download: 72,
    RequestFailed: 73,
    GroupEnded: 74,
    AgentStatus: 75,
    StatusEnd: 76,
}
"""The type code of each message: below 64 to the agent, from 65 to the client, at most 127. They never change."""

_FIRST_TO_CLIENT = 64
_CODECS: Mapping[type, Codec[ToAgent | ToClient]] = {cls: Codec(cls, code=code) for cls, code in CODES.items()}
_TO_AGENT = {code: cast("Codec[ToAgent]", _CODECS[cls]) for cls, code in CODES.items() if code < _FIRST_TO_CLIENT}
_TO_CLIENT = {code: cast("Codec[ToClient]", _CODECS[cls]) for cls, code in CODES.items() if code > _FIRST_TO_CLIENT}
_LENGTH = struct.Struct("<I")
# Where the type code of a body stands, by its first byte: an array of up to 15, 2^16-1 or 2^32-1 items.
_CODE_AT = {**dict.fromkeys(range(0x91, 0xA0), 1), 0xDC: 3, 0xDD: 5}


def encode(message: ToAgent | ToClient) -> bytes:
    """Return the message as it goes over the socket, with its length in front.

    :raises InternalError: it is too long or cannot be told; callers keep to the limits of the fields.
    """
    body = _CODECS[type(message)].pack(message)
    if len(body) > MAX_MESSAGE:
        raise InternalError(f"{type(message).__name__} has {len(body)} bytes, at most {MAX_MESSAGE} can be sent")
    return _LENGTH.pack(len(body)) + body


def decode_to_agent(body: bytes | bytearray | memoryview) -> ToAgent:
    """Return the message of a client, from its body (without the length).

    :raises ProtocolError: it is no message that clients send, or anything about it is wrong.
    """
    code = _code(body)
    codec = _TO_AGENT.get(code)
    if codec is None:
        if code >= _FIRST_TO_CLIENT:
            raise ProtocolError(f"message type {code} goes from agent to client, not to the agent")
        raise ProtocolError(f"message type {code} is not known")
    return codec.unpack(body)


def decode_to_client(body: bytes | bytearray | memoryview) -> ToClient:
    """Return the message of the agent, from its body (without the length).

    :raises ProtocolError: it is no message that agents send, or anything about it is wrong.
    """
    code = _code(body)
    codec = _TO_CLIENT.get(code)
    if codec is None:
        if code < _FIRST_TO_CLIENT:
            raise ProtocolError(f"message type {code} goes from client to agent, not to the client")
        raise ProtocolError(f"message type {code} is not known")
    return codec.unpack(body)


def _code(body: bytes | bytearray | memoryview) -> int:
    """Return the type code before anything else of the body is looked at: limits depend on it."""
    if len(body) > MAX_MESSAGE:
        raise ProtocolError(f"a message has {len(body)} bytes, at most {MAX_MESSAGE} are allowed")
    place = _CODE_AT.get(body[0], len(body)) if body else 0
    if place >= len(body) or body[place] > 0x7F:
        raise ProtocolError("a message must be a msgpack array that begins with its type code")
    return body[place]
