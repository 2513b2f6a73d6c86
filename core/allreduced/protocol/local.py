"""Messages between a client and its node's agent, over a Unix stream socket.

A message is a little-endian ``u32`` body length and a msgpack array ``[type code, field, …]`` in the order of the
fields below. Messages with a descriptor (:data:`WITH_DESCRIPTOR`) carry exactly one, by ``SCM_RIGHTS``, sent with the
first byte of the message. ``request`` numbers are chosen by the client, unique per connection, and echoed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from allreduced.core.errors import WireError

LOWEST_VERSION = 1
HIGHEST_VERSION = 1

MAX_MESSAGE = 2 << 20
"""Bytes that the body of one message may have at most; larger tensors go by arena or in :class:`Upload` pieces."""

CHUNK = 1 << 20
"""Bytes of tensor data in one :class:`Upload` or :class:`Download` at most."""


# Client to agent


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a connection. ``shared_memory`` is false where the client cannot take descriptors."""

    lowest: int
    highest: int
    pid: int
    shared_memory: bool


@dataclass(frozen=True, slots=True)
class Join:
    """Take ``rank`` of ``(job, group)`` with ``size`` ranks. Answered by Joined or RequestFailed.

    ``deadline``: seconds until the gathering is given up. ``default_deadline``: seconds for operations that name none.
    """

    request: int
    job: str
    group: str
    rank: int
    size: int
    local_rank: int
    deadline: float
    default_deadline: float


@dataclass(frozen=True, slots=True)
class AllocateArena:
    """Ask for an input arena of ``nbytes``. Answered by ArenaGranted (with descriptor) or RequestFailed."""

    request: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReleaseArena:
    """Give an input arena back. Operations that still read it finish first. Not answered."""

    arena: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Start an operation. Answered by Done or RequestFailed, exactly once.

    ``group``: the handle from Joined. ``kind``: ``all_reduce``, ``all_reduce_many``, ``broadcast``, ``barrier``.
    ``shape``: canonical text of the shape, ``(3, 4)``; for many tensors ``(3, 4);(5,)``, see ``shape_text``.
    ``count``: elements. ``root``: -1 where the kind has none. ``deadline``: seconds, 0 for the group's default.
    ``algorithm``: empty for the agent's choice. The input is one of: ``payload`` (not None, up to the inline limit of
    Welcome); ``arena >= 0`` and ``offset`` in bytes; ``upload`` true, then Upload pieces follow; or nothing at all
    (barrier, a broadcast's non-root, count 0).
    ``inline_result``: send the result in the message or in Download pieces, whatever its size.
    """

    request: int
    group: int
    kind: str
    name: str
    dtype: int
    op: int
    shape: str
    count: int
    root: int
    priority: int
    deadline: float
    algorithm: str
    payload: bytes | None
    arena: int
    offset: int
    upload: bool
    inline_result: bool


@dataclass(frozen=True, slots=True)
class Upload:
    """A piece of the input of ``request``; pieces come in order and together make ``count`` elements."""

    request: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ReleaseLeases:
    """Results under these leases are no longer read by the client. Not answered."""

    leases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """This client leaves the group on purpose. Not answered."""

    group: int


# Agent to client


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Hello. ``inline_limit``: bytes of a tensor that go inside Submit and Done at most."""

    version: int
    node: str
    incarnation: int
    inline_limit: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The connection is refused for this error and closes after it."""

    error: WireError


@dataclass(frozen=True, slots=True)
class Joined:
    """The group is formed. ``nodes``: every node's name and ranks, by lowest rank; ``node`` indexes it."""

    request: int
    group: int
    generation: int
    rank: int
    size: int
    node: int
    nodes: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ArenaGranted:
    """The input arena, mapped writable by this client only; carries the descriptor."""

    request: int
    arena: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ResultArena:
    """A result arena of ``group``, mapped read-only; sent before the first Done that names it; has a descriptor."""

    arena: int
    group: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ResultArenaGone:
    """No further Done names this arena; views that the client still has stay valid in its own mapping."""

    arena: int


@dataclass(frozen=True, slots=True)
class Done:
    """The operation ended well.

    The result is one of: ``payload``; ``arena >= 0``, ``offset`` and ``nbytes`` under ``lease`` (to be released);
    ``pieces`` true, then Download pieces follow; nothing (barrier, count 0).
    ``participants``: ranks whose contributions are in it; empty means all of the group.
    ``elapsed``: seconds from this rank's submit to the end, at the agent.
    """

    request: int
    payload: bytes | None
    arena: int
    offset: int
    nbytes: int
    lease: int
    pieces: bool
    participants: tuple[int, ...]
    algorithm: str
    elapsed: float


@dataclass(frozen=True, slots=True)
class Download:
    """A piece of the result of ``request``; ``last`` marks the end."""

    request: int
    data: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request ended with this error."""

    request: int
    error: WireError


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """The group can run nothing more; further submits get this error."""

    group: int
    error: WireError


ToAgent: TypeAlias = "Hello | Join | AllocateArena | ReleaseArena | Submit | Upload | ReleaseLeases | Leave"
ToClient: TypeAlias = (
    "Welcome | Refused | Joined | ArenaGranted | ResultArena | ResultArenaGone | Done | Download | RequestFailed"
    " | GroupEnded"
)
WITH_DESCRIPTOR: tuple[type, ...] = (ArenaGranted, ResultArena)
