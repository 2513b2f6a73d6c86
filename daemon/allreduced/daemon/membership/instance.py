"""One formed, or proposed, set of members of a group, over all its generations."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from allreduced.core.errors import AllReducedError
from allreduced.core.identity import GroupKey, Member
from allreduced.daemon.engine.events import GroupStarted
from allreduced.daemon.losses import bounded
from allreduced.daemon.membership.gathering import Claim, Scope
from allreduced.daemon.membership.merge import Policy
from allreduced.protocol.change import Committed, Loss
from allreduced.protocol.peer import Form


class State(enum.Enum):
    """Where an instance is in its life; it only moves down this list."""

    PROPOSED = "proposed"
    RUNNING = "running"
    BROKEN = "broken"
    CUT_OFF = "cut off"


STATES: Mapping[State, str] = {
    State.PROPOSED: "a proposal that waits for the consent of all members; no client is admitted",
    State.RUNNING: "its members run operations, and agree on a change where there is trouble",
    State.BROKEN: "nothing new runs in it: its members agreed on that, and settle what was in doubt, by changes too",
    State.CUT_OFF: "this node is no member any more: the others went on without it, or it gave up; it votes no more",
}
"""What the states of an instance mean."""


@dataclass(slots=True)
class Instance:
    """A set of members that this node belongs to.

    ``local``: rank to claim of each of this node's clients that is still in it. ``consents``: nodes that sent their
    consent; ``consented``: this node sent its own. ``left``: ranks that left on purpose, on any node. ``untold``: those
    of them that the engine learns of behind the change that is under way.

    ``members``, ``mine`` (a place among them) and what follows are those of the current ``generation``; ``form`` is
    what the first one began with.
    """

    form: Form
    mine: int
    local: dict[int, Claim]
    state: State = State.PROPOSED
    consents: set[str] = field(default_factory=set)
    consented: bool = False
    left: set[int] = field(default_factory=set)
    untold: set[int] = field(default_factory=set)
    error: AllReducedError | None = None
    policy: Policy = Policy.FAIL
    generation: int = 0
    members: tuple[Member, ...] = ()
    departed: dict[int, Loss] = field(default_factory=dict)
    """By place: members that are proven to be dead, or that left. No more frames are taken from them."""
    silent: dict[int, Loss] = field(default_factory=dict)
    """By place: members that are silent here, which proves nothing."""
    lost: list[Loss] = field(default_factory=list)
    """Ranks of this node whose processes ended, and that no change has told yet."""
    gaps: set[int] = field(default_factory=set)
    """Places of members whose link was reset: frames of this generation may be lost."""
    give_up_at: float | None = None
    """When a change that is under way, and not decided by then, is not waited for any more."""
    give_up_last: float = 0.0
    """Later than this the change is not waited for, whatever else becomes known."""
    committed: Committed | None = None
    """The last change, for members that may have missed it."""
    former: dict[str, int] = field(default_factory=dict)
    """Nodes, with their incarnations, that changes left out; they may not know it."""
    since: float = 0.0
    """When its clients were admitted."""
    losses: tuple[Loss, ...] = ()
    """All losses, once the group has ended for them."""

    def __post_init__(self) -> None:
        self.generation = self.form.generation
        self.members = self.form.members

    @property
    def group(self) -> int:
        """The number of the instance."""
        return self.form.group

    @property
    def scope(self) -> Scope:
        """Whose claims it was formed of."""
        return Scope(self.form.key, self.form.proof)

    @property
    def proposer(self) -> str:
        """The node that holds rank 0."""
        return self.form.members[0].node

    def others(self) -> list[tuple[str, int]]:
        """Return the other members as (node, incarnation)."""
        return [(member.node, member.incarnation) for at, member in enumerate(self.members) if at != self.mine]

    def place_of(self, node: str) -> int:
        """Return the place of a member; -1 for a node that is none."""
        return next((place for place, member in enumerate(self.members) if member.node == node), -1)

    def ranks_of(self, node: str) -> tuple[int, ...]:
        """Return the ranks that a member holds or held."""
        place = self.place_of(node)
        return self.members[place].ranks if place >= 0 else ()

    def known_losses(self) -> tuple[Loss, ...]:
        """Return what this node knows for itself of losses, and of departed members from anyone."""
        nodes = (*self.departed.items(), *self.silent.items())
        return bounded([*(loss for _, loss in sorted(nodes, key=itemgetter(0))), *self.lost])

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
    """A proposed, running or broken group, for ``status``. ``local``: (rank, client, pid) of this node's clients.

    ``members``: those that it was formed with, so that who is lost is still told. ``state``: "changing" while its
    members agree on a change; ``awaited``: the nodes whose part in that is missing.
    """

    group: int
    key: GroupKey
    state: str
    size: int
    members: tuple[Member, ...]
    local: tuple[tuple[int, int, int], ...]
    left: tuple[int, ...]
    generation: int
    error: AllReducedError | None
    awaited: tuple[str, ...] = ()


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
