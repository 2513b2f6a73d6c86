"""Which claims to ranks become which groups, and what breaks them.

Every agent announces its clients' claims to every peer and so knows all claims of a group. The agent that holds rank 0
proposes the group when every rank is claimed exactly once (``Form``). Each member checks that its own claims still
wait and tells all others its consent (the same frame). With the consent of all, a member admits its clients. A claim
that is gone before that only sends the rest back to waiting, so a killed job and its rerun never meet in one group.

Two claims to one rank: on one node the first wins. On two nodes the one on the node with the lower name wins while both
wait; a claim that runs already wins over every later one. The winner's agent refuses the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from allreduced.core.errors import AllReducedError, PeerLost, from_wire, to_wire
from allreduced.core.identity import GroupKey, Member
from allreduced.daemon.engine.events import GroupBroken, GroupForgotten, RanksLeft
from allreduced.daemon.membership import wording
from allreduced.daemon.membership.actions import (
    Action,
    Admit,
    Reject,
    SendFrame,
    SetTimer,
    TellClients,
    TellEngine,
)
from allreduced.daemon.membership.events import (
    ClientGone,
    ClientJoining,
    ClientLeaving,
    Event,
    FrameArrived,
    PeerDown,
    PeerUp,
    TimePassed,
)
from allreduced.daemon.membership.gathering import Claim, Gathering
from allreduced.daemon.membership.instance import (
    GatheringView,
    GroupView,
    Instance,
    Snapshot,
    State,
    well_formed,
)
from allreduced.daemon.membership.recent import Recent
from allreduced.protocol.peer import Announce, Broken, Form, Left, MembershipFrame, Refuse, Retract

MAX_SIZE = 1 << 15
"""Ranks of one group at most, so that a proposal fits one control frame."""

_GENERATION = 1
_NOT_ADMITTED = 0
_RECENT = 1024


class Membership:
    """The memberships of one node. The same events give the same actions.

    ``draw`` returns random numbers (at least 63 bits are used), for the numbers of claims and groups.
    """

    def __init__(self, node: str, incarnation: int, tile_bytes: int, draw: Callable[[], int]) -> None:
        self._node = node
        self._incarnation = incarnation
        self._tile_bytes = tile_bytes
        self._draw_number = draw
        self._peers: dict[str, int] = {}
        self._gatherings: dict[GroupKey, Gathering] = {}
        self._instances: dict[int, Instance] = {}
        # Frames of one group come over different links, so consents and refusals may overtake the proposal.
        self._early_consents: Recent[set[str]] = Recent(_RECENT)
        self._early_broken: Recent[str] = Recent(_RECENT)
        # Proposals that came to nothing here, while another member may have admitted its clients.
        self._dissolved: Recent[tuple[Claim, ...]] = Recent(_RECENT)
        self._timer: float | None = None
        self._ignored = 0
        self._out: list[Action] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event at time ``now`` and return what is to be done, in order. Never raises for what peers say."""
        self._out = []
        match event:
            case ClientJoining():
                self._client_joining(event)
            case ClientLeaving():
                self._client_leaving(event.client, event.group)
            case ClientGone():
                self._client_gone(event.client)
            case PeerUp():
                self._peer_up(event.node, event.incarnation)
            case PeerDown():
                self._peer_down(event.node, event.error)
            case FrameArrived():
                self._frame_arrived(event.node, event.frame)
            case TimePassed():
                pass  # deadlines are looked at after every event
        self._expire(now)
        self._set_timer()
        out, self._out = self._out, []
        return out

    def snapshot(self) -> Snapshot:
        """Return what is known right now, for ``status``."""
        return Snapshot(
            groups=tuple(
                GroupView(
                    group=instance.group,
                    key=instance.form.key,
                    state=instance.state.value,
                    size=len(instance.form.clients),
                    nodes=tuple((member.node, member.ranks) for member in instance.form.members),
                    local_ranks=tuple(sorted(instance.local)),
                    left=tuple(sorted(instance.left)),
                )
                for instance in self._instances.values()
            ),
            gatherings=tuple(
                GatheringView(
                    key=key,
                    size=size,
                    ranks=tuple(sorted((claim.rank, claim.node, claim.pid) for claim in gathering)),
                    missing=tuple(gathering.missing(size)),
                )
                for key, gathering in self._gatherings.items()
                for size in [max((claim.size for claim in gathering), default=0)]
            ),
            peers=tuple(sorted(self._peers.items())),
            ignored=self._ignored,
        )

    # Clients

    def _client_joining(self, event: ClientJoining) -> None:
        error = self._why_not(event)
        if error is not None:
            self._out.append(Reject(event.client, event.request, error))
            return
        claim = Claim(
            number=self._draw(),
            node=self._node,
            size=event.size,
            rank=event.rank,
            local_rank=event.local_rank,
            pid=event.pid,
            client=event.client,
            request=event.request,
            deadline_at=event.deadline_at,
        )
        self._gatherings.setdefault(event.key, Gathering(event.key)).add(claim)
        for node in self._peers:
            self._out.append(SendFrame(node, _announce(event.key, claim)))
        self._settle(event.key)

    def _why_not(self, event: ClientJoining) -> AllReducedError | None:
        if not 1 <= event.size <= MAX_SIZE or not 0 <= event.rank < event.size:
            return wording.outside(event.key, event.rank, event.size, MAX_SIZE)
        holder = self._running_holder(event.key, event.rank)
        gathering = self._gatherings.get(event.key)
        if holder is None and gathering is not None:
            holder = next((claim for claim in gathering.local() if claim.rank == event.rank), None)
        return wording.claimed(event.key, holder) if holder is not None else None

    def _client_leaving(self, client: int, group: int) -> None:
        instance = self._instances.get(group)
        if instance is None or instance.state is State.PROPOSED:
            return
        ranks = tuple(sorted(rank for rank, claim in instance.local.items() if claim.client == client))
        if not ranks:
            return
        for rank in ranks:
            del instance.local[rank]
        if instance.state is State.RUNNING:
            instance.left.update(ranks)
            self._out.append(TellEngine(RanksLeft(group, ranks)))
            self._tell_members(instance, Left(group, instance.form.generation, ranks))
        self._forget_if_empty(instance)

    def _client_gone(self, client: int) -> None:
        for key, gathering in list(self._gatherings.items()):
            for claim in gathering.local():
                if claim.client == client:
                    self._void(
                        key, gathering, claim, wording.rank_lost(self._node, [claim], "ended while its group gathered")
                    )
            self._settle(key)
        for instance in list(self._instances.values()):
            lost = [claim for claim in instance.local.values() if claim.client == client]
            if not lost or instance.state is State.PROPOSED:
                continue
            for claim in lost:
                del instance.local[claim.rank]
            if instance.state is State.RUNNING:
                self._break(instance, wording.rank_lost(self._node, lost, "ended without leaving the group"))
            self._forget_if_empty(instance)

    # Peers

    def _peer_up(self, node: str, incarnation: int) -> None:
        known = self._peers.get(node)
        if known is not None and known != incarnation:
            self._peer_down(node, PeerLost(f"agent {node!r} was started anew", nodes=(node,)))
        self._peers[node] = incarnation
        for key, gathering in self._gatherings.items():
            for claim in gathering.local():
                self._out.append(SendFrame(node, _announce(key, claim)))
        for instance in list(self._instances.values()):
            if instance.state is not State.PROPOSED or instance.group not in self._instances:
                continue
            if any(other == node and value != incarnation for other, value in instance.others()):
                self._dissolve(instance, PeerLost(f"agent {node!r} was started anew", nodes=(node,)))
                self._settle(instance.form.key)
            else:
                self._consent(instance)

    def _peer_down(self, node: str, error: AllReducedError | None) -> None:
        self._peers.pop(node, None)
        for gathering in self._gatherings.values():
            for claim in gathering:
                if claim.node == node:
                    gathering.remove(claim)
        for instance in list(self._instances.values()):
            ranks = instance.ranks_of(node)
            if not ranks or node == self._node:
                continue
            if instance.state is State.PROPOSED:
                self._dissolve(instance, wording.peer_lost(node, ranks, error))
            elif instance.state is State.RUNNING and error is None:
                self._ranks_left(instance, ranks)
            elif instance.state is State.RUNNING:
                self._break(instance, wording.peer_lost(node, ranks, error))
        for key in list(self._gatherings):
            self._settle(key)

    def _frame_arrived(self, node: str, frame: MembershipFrame) -> None:
        if node not in self._peers:
            self._ignored += 1
            return
        match frame:
            case Announce():
                self._announced(node, frame)
            case Retract():
                self._retracted(node, frame)
            case Refuse():
                self._refused(frame)
            case Form():
                self._form_arrived(node, frame)
            case Broken():
                self._broken_arrived(node, frame)
            case Left():
                self._left_arrived(node, frame)

    def _announced(self, node: str, frame: Announce) -> None:
        if not 1 <= frame.size <= MAX_SIZE or not 0 <= frame.rank < frame.size:
            self._ignored += 1
            return
        bound = 0
        for instance in self._instances.values():
            if instance.form.key != frame.key or frame.client not in instance.form.clients:
                continue
            if instance.state is State.PROPOSED:
                bound = instance.group
            elif instance.error is not None:
                # The link was down when this agent told that the group is broken: the claim must not wait for ever.
                self._out.append(SendFrame(node, Refuse(frame.key, frame.client, to_wire(instance.error))))
                return
        claim = Claim(frame.client, node, frame.size, frame.rank, frame.local_rank, frame.pid, group=bound)
        self._gatherings.setdefault(frame.key, Gathering(frame.key)).add(claim)
        self._settle(frame.key)

    def _retracted(self, node: str, frame: Retract) -> None:
        gathering = self._gatherings.get(frame.key)
        claim = gathering.get(node, frame.client) if gathering is not None else None
        if gathering is not None and claim is not None:
            gathering.remove(claim)
            self._settle(frame.key)

    def _refused(self, frame: Refuse) -> None:
        gathering = self._gatherings.get(frame.key)
        claim = gathering.get(self._node, frame.client) if gathering is not None else None
        # A claim that runs already is not here any more; the other side was refused in turn.
        if gathering is not None and claim is not None:
            self._reject(frame.key, gathering, claim, from_wire(frame.error))
            self._settle(frame.key)

    # Forming

    def _settle(self, key: GroupKey) -> None:
        """Refuse what contradicts, and propose the group if every rank is there and rank 0 is here."""
        gathering = self._gatherings.get(key)
        if gathering is None:
            return
        if gathering.sizes_differ():
            self._reject_sizes(key, gathering)
        self._refuse_rivals(key, gathering)
        if not gathering:
            del self._gatherings[key]
            return
        claims = gathering.complete()
        if claims is not None and claims[0].local:
            self._propose(key, gathering, claims)

    def _reject_sizes(self, key: GroupKey, gathering: Gathering) -> None:
        claims = gathering.free()
        error = wording.sizes_differ(key, claims)
        for claim in claims:
            if claim.local:
                self._reject(key, gathering, claim, error)
            else:
                self._refuse(key, gathering, claim, error)

    def _refuse_rivals(self, key: GroupKey, gathering: Gathering) -> None:
        waiting = {claim.rank: claim for claim in gathering.local()}
        for claim in gathering:
            if claim.local:
                continue
            holder = self._running_holder(key, claim.rank)
            if holder is None and self._node < claim.node:
                holder = waiting.get(claim.rank)
            if holder is not None:
                self._refuse(key, gathering, claim, wording.claimed(key, holder))

    def _propose(self, key: GroupKey, gathering: Gathering, claims: Sequence[Claim]) -> None:
        ranks: dict[str, list[int]] = {}
        for claim in claims:
            ranks.setdefault(claim.node, []).append(claim.rank)
        incarnations = {**self._peers, self._node: self._incarnation}
        group = self._draw()
        while group in self._instances:
            group = self._draw()
        form = Form(
            key=key,
            group=group,
            generation=_GENERATION,
            tile_bytes=self._tile_bytes,
            # Ranks come in order, so nodes come in the order of their lowest rank.
            members=tuple(Member(node, incarnations[node], tuple(held)) for node, held in ranks.items()),
            clients=tuple(claim.number for claim in claims),
        )
        instance = Instance(form, mine=0, local={claim.rank: claim for claim in claims if claim.local})
        self._bind(gathering, instance)
        self._consent(instance)

    def _form_arrived(self, node: str, form: Form) -> None:
        nodes = [member.node for member in form.members]
        mine = nodes.index(self._node) if self._node in nodes else -1
        if (
            not well_formed(form)
            or mine < 0
            or node not in nodes
            or form.members[mine].incarnation != self._incarnation
        ):
            self._ignored += 1
        elif mine == 0 or node != nodes[0] or form.group in self._instances:
            self._consent_arrived(node, form)
        elif self._early_broken.pop(form.group) is None:
            self._proposal_arrived(node, form, mine)

    def _consent_arrived(self, node: str, form: Form) -> None:
        instance = self._instances.get(form.group)
        if instance is None:
            self._early_consents.get_or_add(form.group, set).add(node)
        elif instance.form != form:
            self._ignored += 1
        elif instance.state is State.PROPOSED:
            instance.consents.add(node)
            self._admit_if_agreed(instance)

    def _proposal_arrived(self, node: str, form: Form, mine: int) -> None:
        key = form.key
        gathering = self._gatherings.get(key) or Gathering(key)
        ranks = form.members[mine].ranks
        local: dict[int, Claim] = {}
        for rank in ranks:
            claim = gathering.get(self._node, form.clients[rank])
            if claim is not None and claim.rank == rank and claim.size == len(form.clients):
                local[rank] = claim
        instance = Instance(form, mine, local, consents={node, *(self._early_consents.pop(form.group) or ())})
        gone = [rank for rank in ranks if rank not in local]
        if gone:
            lost = wording.ranks_gone(self._node, gone)
            self._tell_members(instance, Broken(form.group, _NOT_ADMITTED, to_wire(lost)))
            return
        for number in {claim.group for claim in local.values() if claim.group}:
            other = self._instances.get(number)
            if other is not None and other.proposer == node:
                # The proposer has given that one up, and its word on this link comes in order.
                self._dissolve(other, None)
            else:
                busy = wording.bound_elsewhere(self._node)
                self._tell_members(instance, Broken(form.group, _NOT_ADMITTED, to_wire(busy)))
                return
        self._bind(gathering, instance)
        self._consent(instance)

    def _bind(self, gathering: Gathering, instance: Instance) -> None:
        self._instances[instance.group] = instance
        numbers = set(instance.form.clients)
        for claim in gathering:
            if claim.number in numbers:
                claim.group = instance.group

    def _consent(self, instance: Instance) -> None:
        """Consent once every other member can be reached from here; then maybe admit."""
        if instance.consented or any(self._peers.get(node) != known for node, known in instance.others()):
            return
        instance.consented = True
        self._tell_members(instance, instance.form)
        self._admit_if_agreed(instance)

    def _admit_if_agreed(self, instance: Instance) -> None:
        if not instance.consented or any(node not in instance.consents for node, _ in instance.others()):
            return
        key = instance.form.key
        instance.state = State.RUNNING
        gathering = self._gatherings.get(key) or Gathering(key)
        for claim in gathering:
            if claim.group == instance.group:
                gathering.remove(claim)
                if claim.local:
                    # Members too: one that gave the proposal up must not wait for claims that run.
                    self._tell_peers(Retract(key, claim.number))
        started = instance.started()
        self._out.append(TellEngine(started))
        for rank, claim in sorted(instance.local.items()):
            self._out.append(Admit(claim.client, claim.request, rank, started))
        if instance.left:
            self._out.append(TellEngine(RanksLeft(instance.group, tuple(sorted(instance.left)))))
        self._settle(key)

    # Breaking

    def _dissolve(self, instance: Instance, error: AllReducedError | None, source: str = "") -> None:
        """Give up a proposal: its claims wait again. ``error`` None: the other members know already."""
        del self._instances[instance.group]
        local = tuple(instance.local.values())
        self._dissolved.add(instance.group, local)
        for claim in self._gatherings.get(instance.form.key) or ():
            if claim.group == instance.group:
                claim.group = 0
        # Members that cannot reach each other hear of it from the proposer, which reaches all.
        if error is not None and (not source or instance.mine == 0):
            broken = Broken(instance.group, _NOT_ADMITTED, to_wire(error))
            self._tell_members(instance, broken, but=source)

    def _broken_arrived(self, node: str, frame: Broken) -> None:
        error = from_wire(frame.error)
        admitted = frame.generation != _NOT_ADMITTED
        instance = self._instances.get(frame.group)
        if instance is None:
            waiting = self._dissolved.pop(frame.group)
            if waiting is None:
                self._early_broken.add(frame.group, node)
            elif admitted:
                self._reject_all(waiting, frame.group, error)
        elif not instance.ranks_of(node):
            self._ignored += 1
        elif instance.state is State.RUNNING:
            self._break(instance, error, source=node, told=admitted)
        elif instance.state is State.PROPOSED:
            local = tuple(instance.local.values())
            self._dissolve(instance, error, source=node)
            if admitted:
                self._reject_all(local, frame.group, error)
            self._settle(instance.form.key)

    def _reject_all(self, claims: Sequence[Claim], group: int, error: AllReducedError) -> None:
        """Reject claims that still wait after a proposal that other members went on with."""
        for key, gathering in list(self._gatherings.items()):
            for claim in claims:
                if gathering.get(self._node, claim.number) is claim and claim.group in (0, group):
                    self._reject(key, gathering, claim, error)
            self._settle(key)

    def _break(self, instance: Instance, error: AllReducedError, source: str = "", *, told: bool = False) -> None:
        """End a running group. ``told``: the one who said so has told all members."""
        instance.state = State.BROKEN
        instance.error = error
        self._out.append(TellEngine(GroupBroken(instance.group, error)))
        if instance.local:
            self._out.append(TellClients(instance.clients(), instance.group, error))
        if not told:
            self._tell_members(instance, Broken(instance.group, instance.form.generation, to_wire(error)), but=source)

    def _left_arrived(self, node: str, frame: Left) -> None:
        instance = self._instances.get(frame.group)
        if instance is None or not set(frame.ranks) <= set(instance.ranks_of(node)):
            self._ignored += 1
        elif instance.state is State.PROPOSED:
            instance.left.update(frame.ranks)  # the other side is admitted already; told when this one is
        elif instance.state is State.RUNNING:
            self._ranks_left(instance, frame.ranks)

    def _ranks_left(self, instance: Instance, ranks: Sequence[int]) -> None:
        new = tuple(sorted(set(ranks) - instance.left))
        if new:
            instance.left.update(new)
            self._out.append(TellEngine(RanksLeft(instance.group, new)))

    def _forget_if_empty(self, instance: Instance) -> None:
        if not instance.local:
            del self._instances[instance.group]
            self._out.append(TellEngine(GroupForgotten(instance.group)))

    # Claims

    def _reject(self, key: GroupKey, gathering: Gathering, claim: Claim, error: AllReducedError) -> None:
        self._out.append(Reject(claim.client, claim.request, error))
        self._void(key, gathering, claim, wording.rank_lost(self._node, [claim], "gave up while its group gathered"))

    def _void(self, key: GroupKey, gathering: Gathering, claim: Claim, why: AllReducedError) -> None:
        gathering.remove(claim)
        self._tell_peers(Retract(key, claim.number))
        instance = self._instances.get(claim.group)
        if instance is not None:
            del instance.local[claim.rank]
            self._dissolve(instance, why)

    def _refuse(self, key: GroupKey, gathering: Gathering, claim: Claim, error: AllReducedError) -> None:
        # Not looked at again: its agent retracts it, or answers that it runs already by refusing the local claim.
        gathering.remove(claim)
        self._out.append(SendFrame(claim.node, Refuse(key, claim.number, to_wire(error))))

    def _expire(self, now: float) -> None:
        for key, gathering in list(self._gatherings.items()):
            expired = [claim for claim in gathering.local() if claim.deadline_at <= now]
            for claim in expired:
                self._reject(key, gathering, claim, self._deadline_exceeded(key, gathering, claim))
            if expired:
                self._settle(key)

    def _deadline_exceeded(self, key: GroupKey, gathering: Gathering, claim: Claim) -> AllReducedError:
        instance = self._instances.get(claim.group)
        if instance is None:
            return wording.not_gathered(key, claim.size, gathering.missing(claim.size))
        unreached = [node for node, known in instance.others() if self._peers.get(node) != known]
        return wording.not_formed(key, self._node, unreached)

    def _set_timer(self) -> None:
        deadlines = [claim.deadline_at for gathering in self._gatherings.values() for claim in gathering.local()]
        at = min(deadlines, default=None)
        if at != self._timer:
            self._timer = at
            self._out.append(SetTimer(at))

    # Small helpers

    def _running_holder(self, key: GroupKey, rank: int) -> Claim | None:
        for instance in self._instances.values():
            if instance.state is State.RUNNING and instance.form.key == key and rank in instance.local:
                return instance.local[rank]
        return None

    def _tell_peers(self, frame: MembershipFrame) -> None:
        self._out.extend(SendFrame(node, frame) for node in self._peers)

    def _tell_members(self, instance: Instance, frame: MembershipFrame, but: str = "") -> None:
        for node, incarnation in instance.others():
            if node != but and self._peers.get(node) == incarnation:
                self._out.append(SendFrame(node, frame))

    def _draw(self) -> int:
        number = 0
        while not number:
            number = self._draw_number() & (2**63 - 1)
        return number


def _announce(key: GroupKey, claim: Claim) -> Announce:
    return Announce(key, claim.size, claim.rank, claim.number, claim.pid, claim.local_rank)
