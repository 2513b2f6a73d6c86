"""What memberships want done. The driver executes actions in the order of the list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from allreduced.core.errors import AllReducedError
from allreduced.daemon.engine.events import (
    Changed,
    Freeze,
    GroupBroken,
    GroupForgotten,
    GroupStarted,
    NodeDeparted,
    RanksLeft,
)
from allreduced.protocol.peer import MembershipFrame


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send a control frame to a peer agent."""

    node: str
    frame: MembershipFrame


@dataclass(frozen=True, slots=True)
class Admit:
    """Tell the client that its group is formed and that it holds ``rank``. Comes after TellEngine(GroupStarted)."""

    client: int
    request: int
    rank: int
    started: GroupStarted


@dataclass(frozen=True, slots=True)
class Reject:
    """Tell the client that it cannot have the rank."""

    client: int
    request: int
    error: AllReducedError


@dataclass(frozen=True, slots=True)
class TellEngine:
    """Give the engine this event."""

    event: GroupStarted | GroupBroken | Freeze | Changed | NodeDeparted | RanksLeft | GroupForgotten


@dataclass(frozen=True, slots=True)
class TellClients:
    """Tell these clients of this node that the group can run nothing more."""

    clients: tuple[int, ...]
    group: int
    error: AllReducedError


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send TimePassed at this time; replaces the timer set before. None: no timer."""

    at: float | None


Action: TypeAlias = "SendFrame | Admit | Reject | TellEngine | TellClients | SetTimer"
