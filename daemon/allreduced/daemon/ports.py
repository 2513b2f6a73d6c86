"""What the driver needs from the two planes: one for the clients of this node, one for the peer agents.

``local_server`` and ``peers`` implement these; tests of the driver use small fakes. This keeps the driver free of both.
They in turn see the driver as an :class:`EventSink`, and the driver sees the pure parts as ``EnginePort`` and
``MembershipPort``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from allreduced.core.errors import AllReducedError
from allreduced.daemon.engine.actions import Action as EngineAction
from allreduced.daemon.engine.events import Event as EngineEvent
from allreduced.daemon.engine.events import GroupStarted, Submitted
from allreduced.daemon.membership.actions import Action as MembershipAction
from allreduced.daemon.membership.events import Event as MembershipEvent
from allreduced.protocol.handshake import HIGHEST_VERSION
from allreduced.protocol.peer import Frame
from allreduced.transports.base import Link


class Result(NamedTuple):
    """How an operation ended well, for one client; sizes and offsets in bytes, ``elapsed`` in seconds.

    ``data``: bytes to copy into the message; else ``arena >= 0`` names a result arena, read under ``lease``, whose
    descriptor the port sends first if the client does not have it; neither: no data.
    """

    data: memoryview | None
    arena: int
    offset: int
    nbytes: int
    lease: int
    participants: tuple[int, ...]
    algorithm: str
    elapsed: float


@dataclass(frozen=True, slots=True)
class ReachablePeer:
    """A peer agent that there is a link to, for ``status``.

    ``address``: where others can dial it, empty until it said so; ``remote``: where its link comes from. ``silence``:
    seconds since something was heard of it. ``transport`` and ``way``: what carries the data of the link, and about it.
    ``version``: of the agents' protocol, that both speak.
    """

    node: str
    incarnation: int
    address: str
    remote: str
    silence: float
    transport: str = ""
    way: str = ""
    version: int = HIGHEST_VERSION


class ClientPort(Protocol):
    """The local plane, as the driver sees it. Calls for a client that is gone do nothing."""

    def admitted(self, client: int, request: int, rank: int, started: GroupStarted) -> None:
        """Send Joined."""

    def failed(self, client: int, request: int, error: AllReducedError) -> None:
        """Send RequestFailed (of a join or of an operation)."""

    def delivered(self, client: int, request: int, result: Result) -> None:
        """Send Done; ``result.data`` is copied before this returns."""

    def arena_gone(self, arena: int) -> None:
        """Tell the clients that have the result arena that it is dropped."""

    def group_ended(self, clients: Sequence[int], group: int, error: AllReducedError) -> None:
        """Send GroupEnded."""


class PeerPort(Protocol):
    """The peer plane, as the driver sees it."""

    def send_frame(self, node: str, frame: Frame) -> None:
        """Send a control frame; dropped if there is no link to the node (its PeerDown is on the way)."""

    def link(self, node: str) -> Link | None:
        """Return the live link to the node, for data."""


class EnginePort(Protocol):
    """The engine, as the driver sees it."""

    @property
    def idle(self) -> bool:
        """True where no operation of this node's clients goes on, and none is owed to other nodes any more."""

    def handle(self, event: EngineEvent, now: float) -> Sequence[EngineAction]:
        """Return what is to be done, in order."""


class MembershipPort(Protocol):
    """The memberships, as the driver sees them."""

    def handle(self, event: MembershipEvent, now: float) -> Sequence[MembershipAction]:
        """Return what is to be done, in order."""


class Meter(Protocol):
    """Who counts how calls end."""

    def delivered(self, call: Submitted, elapsed: float) -> None:
        """Take note of a call that ended well, ``elapsed`` seconds after it was made."""

    def failed(self, call: Submitted, error: AllReducedError) -> None:
        """Take note of a call that failed."""


class EventSink(Protocol):
    """The driver, as the planes see it. Everything is called on the loop's thread."""

    def engine_event(self, event: EngineEvent) -> None:
        """Give the engine an event. Its actions are done on return, unless this was called from within an action."""

    def membership_event(self, event: MembershipEvent) -> None:
        """Give the memberships an event, in the same way."""

    def now(self) -> float:
        """Return the time of the clock that deadlines are on, in seconds."""
