"""One formed, or proposed, set of members of a group."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from allreduced.core.errors import AllReducedError
from allreduced.core.identity import GroupKey, Member
from allreduced.daemon.engine.events import GroupStarted
from allreduced.daemon.membership.gathering import Claim
from allreduced.protocol.peer import Form


class State(enum.Enum):
    """Where an instance is in its life; it only moves down this list."""

    PROPOSED = "proposed"
    RUNNING = "running"
    BROKEN = "broken"


@dataclass(slots=True)
class Instance:
    """A set of members that this node belongs to.

    ``local``: rank to claim of each of this node's clients that is still in it. ``consents``: nodes that sent their
    consent; ``consented``: this node sent its own. ``left``: ranks that left on purpose, on any node.
    """

    form: Form
    mine: int
    local: dict[int, Claim]
    state: State = State.PROPOSED
    consents: set[str] = field(default_factory=set)
    consented: bool = False
    left: set[int] = field(default_factory=set)
    error: AllReducedError | None = None

    @property
    def group(self) -> int:
        """The number of the instance."""
        return self.form.group

    @property
    def proposer(self) -> str:
        """The node that holds rank 0."""
        return self.form.members[0].node

    def others(self) -> list[tuple[str, int]]:
        """Return the other members as (node, incarnation)."""
        return [(member.node, member.incarnation) for at, member in enumerate(self.form.members) if at != self.mine]

    def ranks_of(self, node: str) -> tuple[int, ...]:
        """Return the ranks that a member holds or held."""
        return next((member.ranks for member in self.form.members if member.node == node), ())

    def started(self) -> GroupStarted:
        """Return what the engine is told when the clients are admitted."""
        form = self.form
        return GroupStarted(
            group=form.group,
            key=form.key,
            generation=form.generation,
            tile_bytes=form.tile_bytes,
            members=form.members,
            mine=self.mine,
            local={rank: self.local[rank].client for rank in sorted(self.local)},
        )

    def clients(self) -> tuple[int, ...]:
        """Return the clients of this node that are in it."""
        return tuple(sorted({claim.client for claim in self.local.values()}))


@dataclass(frozen=True, slots=True)
class GroupView:
    """A proposed, running or broken group, for ``status``. ``local``: (rank, client, pid) of this node's clients."""

    group: int
    key: GroupKey
    state: str
    size: int
    members: tuple[Member, ...]
    local: tuple[tuple[int, int, int], ...]
    left: tuple[int, ...]
    generation: int
    error: AllReducedError | None


@dataclass(frozen=True, slots=True)
class GatheringView:
    """A group that waits for ranks, for ``status``. ``silent``: agents that have not consented to the proposal."""

    key: GroupKey
    size: int
    ranks: tuple[tuple[int, str, int, float], ...]
    """(rank, node, pid, since when) of those that are here."""
    silent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What memberships know right now. ``ignored`` counts frames that made no sense."""

    groups: tuple[GroupView, ...]
    gatherings: tuple[GatheringView, ...]
    peers: tuple[tuple[str, int], ...]
    ignored: int


def well_formed(form: Form) -> bool:
    """Tell whether a proposal is consistent in itself.

    The members' ranks must partition ``0 … size-1``, members come in the order of their lowest rank, each node once.
    """
    members = form.members
    if form.group <= 0 or form.generation <= 0 or form.tile_bytes <= 0 or not members:
        return False
    if any(not member.ranks or list(member.ranks) != sorted(set(member.ranks)) for member in members):
        return False
    if len({member.node for member in members}) != len(members):
        return False
    if [member.ranks[0] for member in members] != sorted(member.ranks[0] for member in members):
        return False
    ranks = sorted(rank for member in members for rank in member.ranks)
    return ranks == list(range(len(form.clients)))
