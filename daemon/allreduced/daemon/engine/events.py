"""What happens to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from allreduced.core.errors import AllReducedError
from allreduced.core.identity import GroupKey, Member
from allreduced.daemon.engine.region import Region
from allreduced.protocol.change import Change
from allreduced.protocol.peer import EngineFrame, Fingerprint


@dataclass(frozen=True, slots=True)
class GroupStarted:
    """A group was formed. ``mine`` indexes ``members`` (by lowest rank); ``local``: rank to client of this node."""

    group: int
    key: GroupKey
    generation: int
    tile_bytes: int
    members: tuple[Member, ...]
    mine: int
    local: Mapping[int, int]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(len(member.ranks) for member in self.members)


@dataclass(frozen=True, slots=True)
class GroupBroken:
    """The group can run nothing more on this node: everything in flight and later ends with ``error``.

    Nothing was agreed with the others: this member is cut off, or there are no others.
    """

    group: int
    error: AllReducedError


@dataclass(frozen=True, slots=True)
class Freeze:
    """This member takes part in a change of ``generation``: nothing more is delivered in it. Answered by Frozen."""

    group: int
    generation: int


@dataclass(frozen=True, slots=True)
class Changed:
    """The members of ``generation`` agreed on its end. It may not include this node, or come after GroupBroken."""

    group: int
    generation: int
    change: Change


@dataclass(frozen=True, slots=True)
class Heard:
    """These nodes were heard just now."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeDeparted:
    """The node is proven to be dead, or said goodbye: its vote is not needed for a quorum of the group."""

    group: int
    node: str


@dataclass(frozen=True, slots=True)
class RanksLeft:
    """Ranks (local or not) left on purpose: operations that still lack them can never end well."""

    group: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupForgotten:
    """No client of this node is in the group any more: drop all its state once nothing is outstanding."""

    group: int


@dataclass(frozen=True, slots=True)
class Submitted:
    """A client calls an operation. Ends with exactly one Deliver or Fail for (client, request).

    Until then ``source`` (None where this rank gives no data) may be read by kernels and links.
    ``deadline_at`` is on the engine's clock. ``refused``: the agent cannot take this rank's part. It still counts as
    a use of the name, or later calls would meet others than they should; the operation fails with it on every rank.
    """

    client: int
    request: int
    group: int
    rank: int
    name: str
    fingerprint: Fingerprint
    source: Region | None
    deadline_at: float
    priority: int
    refused: AllReducedError | None = None


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client's connection ended: its leases are back. Its submits still end with Deliver or Fail."""

    client: int


@dataclass(frozen=True, slots=True)
class LeasesReturned:
    """The client no longer reads these results. Unknown leases are ignored."""

    client: int
    leases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """A peer agent sent a control frame about an operation."""

    node: str
    frame: EngineFrame


@dataclass(frozen=True, slots=True)
class Received:
    """Bytes landed in a posted receive."""

    receive: int
    offset: int
    nbytes: int
    tag: int


@dataclass(frozen=True, slots=True)
class ReceiveCancelled:
    """The memory of a cancelled receive is safe again."""

    receive: int


@dataclass(frozen=True, slots=True)
class Sent:
    """The memory of a send is no longer read (also after a cancel, also after its link failed)."""

    send: int


@dataclass(frozen=True, slots=True)
class Reduced:
    """A kernel job is complete."""

    job: int


@dataclass(frozen=True, slots=True)
class ArenaReady:
    """A buffer that the engine asked for exists and is mapped."""

    buffer: int


@dataclass(frozen=True, slots=True)
class ArenaFailed:
    """A buffer that the engine asked for could not be made.

    For LimitExceeded, what needs it waits as long as other arenas of the engine may make room.
    """

    buffer: int
    error: AllReducedError


@dataclass(frozen=True, slots=True)
class RoomMade:
    """The agent gave memory back that was not the engine's: there may be room for buffers that could not be made."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The time of the last SetTimer has come (or more of it has)."""


Event: TypeAlias = (
    "GroupStarted | GroupBroken | Freeze | Changed | Heard | NodeDeparted | RanksLeft | GroupForgotten | Submitted"
    " | ClientGone | LeasesReturned | FrameArrived | Received | ReceiveCancelled | Sent | Reduced | ArenaReady"
    " | ArenaFailed | RoomMade | TimePassed"
)
