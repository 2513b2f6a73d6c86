"""What happens to memberships."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from allreduced.core.errors import AllReducedError
from allreduced.core.identity import GroupKey
from allreduced.protocol.peer import MembershipFrame


@dataclass(frozen=True, slots=True)
class ClientJoining:
    """A client claims ``rank``. Ends with exactly one Admit or Reject. ``deadline_at`` is on the membership's clock."""

    client: int
    request: int
    key: GroupKey
    size: int
    rank: int
    local_rank: int
    pid: int
    deadline_at: float


@dataclass(frozen=True, slots=True)
class ClientLeaving:
    """A client leaves a group on purpose."""

    client: int
    group: int


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A client's connection ended: each rank that it still holds is lost, each claim of it is void."""

    client: int


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A link to a peer agent is up. A known name with another incarnation is a new agent in the place of a dead one."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The peer is dead or said goodbye (``error`` None)."""

    node: str
    error: AllReducedError | None


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """A peer agent sent a control frame about memberships."""

    node: str
    frame: MembershipFrame


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The time of the last SetTimer has come."""


Event: TypeAlias = "ClientJoining | ClientLeaving | ClientGone | PeerUp | PeerDown | FrameArrived | TimePassed"
