"""What happens to memberships."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from allreduced.core.errors import AllReducedError
from allreduced.core.identity import GroupKey
from allreduced.daemon.engine.actions import Frozen as EngineFrozen
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
    proof: bytes = field(default=b"", repr=False)
    """Of the client's job secret, see ``protocol.job_secret``; kept out of logs."""


@dataclass(frozen=True, slots=True)
class ClientLeaving:
    """A client leaves a group on purpose."""

    client: int
    group: int


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A client's connection ended: each rank that it still holds is lost, each claim of it is void.

    ``doing``: what it was doing, in words, for the error that others get; empty where that is not known.
    """

    client: int
    doing: str = ""


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A link to a peer agent is up. A known name with another incarnation is a new agent in the place of a dead one.

    After LinkLost with the same incarnation: frames of both directions may have been lost in between.
    """

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link to a peer ended, which proves nothing: PeerUp or PeerDown follows within the failure timeout.

    ``reason``: for the log.
    """

    node: str
    reason: str = field(default="another link took its place", compare=False)


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The peer is dead or said goodbye (``error`` None).

    ``proven``: its agent is known to be gone (refused, started anew, goodbye); else it was silent for too long.
    """

    node: str
    error: AllReducedError | None
    proven: bool = False


@dataclass(frozen=True, slots=True)
class Frozen:
    """The engine delivers nothing more in this generation; what it has of it. The answer to Freeze."""

    frozen: EngineFrozen


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The engine cannot do what was agreed: this member must leave the group."""

    group: int
    error: AllReducedError


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """A peer agent sent a control frame about memberships."""

    node: str
    frame: MembershipFrame


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The time of the last SetTimer has come."""


Event: TypeAlias = (
    "ClientJoining | ClientLeaving | ClientGone | PeerUp | LinkLost | PeerDown | FrameArrived | Frozen | GiveUp"
    " | TimePassed"
)
