"""What the engine wants done. The driver executes actions in the order of the list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from allreduced.core.dtypes import DType
from allreduced.core.errors import AllReducedError
from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.region import Region
from allreduced.protocol.change import Failure, Result
from allreduced.protocol.peer import EngineFrame


@dataclass(frozen=True, slots=True)
class CreateArena:
    """Make a buffer: a result arena of ``group``, or private to the agent if 0. ArenaReady or ArenaFailed follows."""

    buffer: int
    group: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DestroyArena:
    """Drop a buffer that nothing uses any more."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine ``sources`` element by element, in this order, into ``target``; Reduced follows.

    All regions have ``count`` elements of ``dtype``; but the last ``partials`` sources, and the target if
    ``partial_target``, have them of ``dtype.accumulator``. ``target`` may be the same region as one source, else it
    overlaps none. Where ``reduction`` is MEAN the sum is divided by ``divisor``; a partial sum of a mean is asked for
    as SUM. ``share``: whose part of the reduction threads it takes, the uid of its group.
    """

    job: int
    dtype: DType
    reduction: Reduction
    divisor: int
    count: int
    sources: tuple[Region, ...]
    target: Region
    priority: int
    partials: int = 0
    partial_target: bool = False
    share: int = 0


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Open ``region`` for data from ``node``. Comes before the frame whose grant names ``receive``."""

    receive: int
    node: str
    region: Region


@dataclass(frozen=True, slots=True)
class CancelReceive:
    """Close a posted receive; ReceiveCancelled follows (also if its link is gone)."""

    receive: int
    node: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``region`` to ``offset`` of the receive that ``token`` names at ``node``; Sent follows.

    ``share``: whose part of the link it takes, the uid of its group.
    """

    send: int
    node: str
    token: bytes
    offset: int
    region: Region
    tag: int
    priority: int
    share: int = 0


@dataclass(frozen=True, slots=True)
class CancelSend:
    """Stop a send; Sent follows."""

    send: int
    node: str


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send a control frame; the driver fills in the tokens of its grants. Dropped if there is no link to ``node``."""

    node: str
    frame: EngineFrame


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give the client its result. ``region`` None: there is no data.

    ``lease`` 0: the driver copies the bytes out before it handles the next action; else the client reads the result
    arena until LeasesReturned.
    """

    client: int
    request: int
    region: Region | None
    lease: int
    participants: tuple[int, ...]
    algorithm: str
    elapsed: float


@dataclass(frozen=True, slots=True)
class Fail:
    """Give the client its error."""

    client: int
    request: int
    error: AllReducedError


@dataclass(frozen=True, slots=True)
class Frozen:
    """Answer to Freeze, for the memberships: what this member has of ``generation``. Fields: see ``change.Promise``."""

    group: int
    generation: int
    results: tuple[Result, ...]
    failures: tuple[Failure, ...]
    round: int
    refused: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Tell the memberships that this member cannot do what was agreed and must leave the group with this error."""

    group: int
    error: AllReducedError


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send TimePassed at this time of the engine's clock; replaces the timer set before. None: no timer."""

    at: float | None


Action: TypeAlias = (
    "CreateArena | DestroyArena | Reduce | PostReceive | CancelReceive | Send | CancelSend | SendFrame | Deliver | Fail"
    " | Frozen | GiveUp | SetTimer"
)
