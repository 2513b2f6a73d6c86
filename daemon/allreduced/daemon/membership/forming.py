"""How claims to ranks become groups: claims gather, rank 0's agent proposes, all members consent.

Every agent announces its clients' claims to every peer and so knows all claims of a group. The agent that holds rank 0
proposes the group when every rank is claimed exactly once (``Form``). Each member checks that its own claims still
wait and tells all others its consent (the same frame). With the consent of all, a member admits its clients. A claim
that is gone before that only sends the rest back to waiting, so a killed job and its rerun never meet in one group.

Two claims to one rank: on one node the first wins. On two nodes the one on the node with the lower name wins while both
wait; a claim that runs already wins over every later one. The winner's agent refuses the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from allreduced.core.errors import (
    AllReducedError,
    DeadlineExceeded,
    MismatchError,
    PeerLost,
    RankLost,
    from_wire,
    to_wire,
)
from allreduced.daemon.engine.events import RanksLeft
from allreduced.daemon.membership import wording
from allreduced.daemon.membership.actions import Admit, Reject, SendFrame, TellEngine
from allreduced.daemon.membership.disagreement import Disagreements
from allreduced.daemon.membership.events import ClientJoining
from allreduced.daemon.membership.gathering import Claim, Gathering, Scope
from allreduced.daemon.membership.instance import Instance, State
from allreduced.daemon.membership.proposal import claims_in, proposal, well_formed
from allreduced.daemon.membership.recent import Recent
from allreduced.daemon.membership.scene import Scene
from allreduced.daemon.membership.strangers import sides, strangers
from allreduced.protocol.peer import Announce, Broken, Form, Refuse, Retract

MAX_SIZE = 1 << 15
"""Ranks of one group at most, so that a proposal fits one control frame."""

ANY = 0
"""The client in a Refuse that is about the group: its other ranks were refused."""

_NOT_ADMITTED = 0
"""The generation in a Broken: its sender has not admitted its clients."""

_RECENT = 1024


class Forming:
    """Claims that wait, and proposals that wait for the consent of all members.

    ``tile_bytes`` holds for the groups that this node proposes. ``draw`` returns random numbers of at least 63 bits.
    """

    def __init__(self, scene: Scene, tile_bytes: int, draw: Callable[[], int]) -> None:
        self._scene = scene
        self._tile_bytes = tile_bytes
        self._draw_number = draw
        self._gatherings: dict[Scope, Gathering] = {}
        self._secrets = False
        """Whether anybody gave a job secret yet: else there are no strangers to look for."""
        # Frames of one group come over different links, so consents and refusals may overtake the proposal.
        self._early_consents: Recent[set[str]] = Recent(_RECENT)
        self._early_broken: Recent[str] = Recent(_RECENT)
        self._disagreements = Disagreements(2 * scene.timing.failure_timeout)
        # Proposals that came to nothing here, while another member may have admitted its clients.
        self._dissolved: Recent[tuple[Claim, ...]] = Recent(_RECENT)

    @property
    def gatherings(self) -> Iterable[Gathering]:
        """The claims that wait, by group."""
        return self._gatherings.values()

    # Clients

    def client_joining(self, event: ClientJoining) -> None:
        """Take the claim of a client, or refuse it at once."""
        error = self._why_not(event)
        if error is not None:
            self._scene.out.append(Reject(event.client, event.request, error))
            return
        claim = Claim(
            number=self._draw(),
            node=self._scene.node,
            size=event.size,
            rank=event.rank,
            local_rank=event.local_rank,
            pid=event.pid,
            client=event.client,
            request=event.request,
            since=self._scene.now,
            deadline_at=event.deadline_at,
            proof=event.proof,
        )
        scope = Scope(event.key, event.proof)
        self._secrets = self._secrets or bool(event.proof)
        self._gatherings.setdefault(scope, Gathering(scope)).add(claim)
        for node in self._scene.peers:
            self._scene.out.append(SendFrame(node, claim.announced(event.key)))
        self._settle(scope)

    def _why_not(self, event: ClientJoining) -> AllReducedError | None:
        if not 1 <= event.size <= MAX_SIZE or not 0 <= event.rank < event.size:
            return wording.outside(event.key, event.rank, event.size, MAX_SIZE)
        scope = Scope(event.key, event.proof)
        holder = self._scene.running_holder(scope, event.rank)
        gathering = self._gatherings.get(scope)
        if holder is None and gathering is not None:
            holder = next((claim for claim in gathering.local() if claim.rank == event.rank), None)
        if holder is not None:
            return wording.claimed(event.key, holder)
        return self._disagreements.claimed(scope, event.rank, self._scene.now)

    def client_gone(self, client: int) -> None:
        """Void the claims of a client that ended."""
        for scope, gathering in list(self._gatherings.items()):
            for claim in gathering.local():
                if claim.client == client:
                    lost = wording.rank_lost(self._scene.node, [claim], "ended while its group gathered")
                    self._void(gathering, claim, lost)
            self._settle(scope)

    def expire(self, now: float) -> None:
        """Reject the claims whose deadline has come, and those that gave another job secret than most."""
        for scope, gathering in list(self._gatherings.items()):
            expired = [claim for claim in gathering.local() if claim.deadline_at <= now]
            for claim in expired:
                self._reject(gathering, claim, self._deadline_exceeded(gathering, claim))
            if expired:
                self._settle(scope)
        if self._secrets:
            self._refuse_strangers(now)

    def _deadline_exceeded(self, gathering: Gathering, claim: Claim) -> AllReducedError:
        key = gathering.key
        instance = self._scene.instances.get(claim.group)
        if instance is None and gathering.obstacle is not None:
            return gathering.obstacle
        if instance is None:
            others = sides(self._gatherings, self._scene).get(key, ()) if self._secrets else ()
            strange = sorted({rank for side in others if side.proof != claim.proof for rank in side.ranks})
            return wording.not_gathered(key, claim.size, gathering.missing(claim.size), strange)
        return wording.not_formed(key, self._not_agreed(instance))

    def _not_agreed(self, instance: Instance) -> str:
        silent = [node for node, _ in instance.others() if node not in instance.consents]
        return wording.not_agreed(self._scene.node, self._scene.unreached(instance), silent)

    def _refuse_strangers(self, now: float) -> None:
        for due, gathering, claim, other in strangers(self._gatherings, self._scene):
            if due > now:
                continue
            error = wording.stranger(gathering.key, claim, sorted(other.ranks))
            if claim.local:
                self._reject(gathering, claim, error)
            else:
                self._refuse(gathering, claim, error)
            self._settle(gathering.scope)

    def next_deadline(self) -> float | None:
        """Return when :meth:`expire` is due, None where nothing waits."""
        deadlines = [claim.deadline_at for gathering in self._gatherings.values() for claim in gathering.local()]
        if self._secrets:
            deadlines += [due for due, _, _, _ in strangers(self._gatherings, self._scene)]
        return min(deadlines, default=None)

    # Peers

    def peer_up(self, node: str, incarnation: int) -> None:
        """Announce what waits here to a new peer, and go on with proposals that waited for it."""
        for gathering in self._gatherings.values():
            for claim in gathering.local():
                self._scene.out.append(SendFrame(node, claim.announced(gathering.key)))
        for instance in self._proposed():
            if instance.group not in self._scene.instances:
                continue  # went with the one before it
            if any(other == node and value != incarnation for other, value in instance.others()):
                self._dissolve(instance, PeerLost(f"agent {node!r} was started anew", nodes=(node,)))
                self._settle(instance.scope)
            else:
                self._consent(instance)

    def peer_down(self, node: str, error: AllReducedError | None) -> None:
        """Forget the claims of a peer that is gone, and the proposals with it."""
        for gathering in self._gatherings.values():
            for claim in gathering:
                if claim.node == node:
                    gathering.remove(claim)
        for instance in self._proposed():
            ranks = instance.ranks_of(node)
            if ranks and node != self._scene.node:
                self._dissolve(instance, wording.peer_lost(node, ranks, error))
        for scope in list(self._gatherings):
            self._settle(scope)

    def announced(self, node: str, frame: Announce) -> None:
        """Take the claim of a client of a peer."""
        if not 1 <= frame.size <= MAX_SIZE or not 0 <= frame.rank < frame.size:
            self._scene.ignored += 1
            return
        bound = 0
        for instance in self._scene.instances_of(frame.key):
            if frame.client not in instance.form.clients:
                continue
            if instance.state is State.PROPOSED:
                bound = instance.group
            elif instance.error is not None:
                # The link was down when this agent told that the group is broken: the claim must not wait for ever.
                refusal = Refuse(frame.key, frame.client, to_wire(instance.error), frame.proof)
                self._scene.out.append(SendFrame(node, refusal))
                return
        scope = Scope(frame.key, frame.proof)
        self._disagreements.claimed(scope, frame.rank, self._scene.now)
        claim = Claim(
            frame.client,
            node,
            frame.size,
            frame.rank,
            frame.local_rank,
            frame.pid,
            since=self._scene.now,
            group=bound,
            proof=frame.proof,
        )
        self._secrets = self._secrets or bool(frame.proof)
        self._gatherings.setdefault(scope, Gathering(scope)).add(claim)
        self._settle(scope)

    def retracted(self, node: str, frame: Retract) -> None:
        """Forget the claim of a client of a peer."""
        scope = Scope(frame.key, frame.proof)
        gathering = self._gatherings.get(scope)
        claim = gathering.get(node, frame.client) if gathering is not None else None
        if gathering is not None and claim is not None:
            gathering.remove(claim)
            self._settle(scope)

    def refused(self, frame: Refuse) -> None:
        """Reject a claim of this node's that a peer refuses; client 0: any that waits for ranks which were refused."""
        scope = Scope(frame.key, frame.proof)
        gathering = self._gatherings.get(scope, Gathering(scope))
        error = from_wire(frame.error)
        # A claim that runs already is not here any more; the other side was refused in turn.
        refused = [claim for claim in gathering.local() if claim.number == frame.client]
        if frame.client == ANY and isinstance(error, MismatchError):
            self._disagreements.add(scope, error, self._scene.now)
            refused = [claim for claim in gathering.local() if claim.rank not in error.by_rank and not claim.group]
        for claim in refused:
            self._reject(gathering, claim, error)
        if refused:
            self._settle(scope)

    # Proposals

    def _settle(self, scope: Scope) -> None:
        """Refuse what contradicts, and propose the group if every rank is there and rank 0 is here."""
        gathering = self._gatherings.get(scope)
        if gathering is None:
            return
        if gathering.sizes_differ():
            self._reject_sizes(gathering)
        self._refuse_rivals(gathering)
        if not gathering:
            del self._gatherings[scope]
            return
        claims = gathering.complete()
        if claims is not None and claims[0].local:
            self._propose(gathering, claims)

    def _reject_sizes(self, gathering: Gathering) -> None:
        scope, claims = gathering.scope, gathering.free()
        error = wording.sizes_differ(scope.key, claims)
        self._disagreements.add(scope, error, self._scene.now)
        if any(claim.local for claim in claims):
            self._scene.tell_peers(Refuse(scope.key, ANY, to_wire(error), scope.proof))
        for claim in claims:
            if claim.local:
                self._reject(gathering, claim, error)
            else:
                self._refuse(gathering, claim, error)

    def _refuse_rivals(self, gathering: Gathering) -> None:
        waiting = {claim.rank: claim for claim in gathering.local()}
        for claim in gathering:
            if claim.local:
                continue
            holder = self._scene.running_holder(gathering.scope, claim.rank)
            if holder is None and self._scene.node < claim.node:
                holder = waiting.get(claim.rank)
            if holder is not None:
                self._refuse(gathering, claim, wording.claimed(gathering.key, holder))

    def _propose(self, gathering: Gathering, claims: Sequence[Claim]) -> None:
        incarnations = {**self._scene.peers, self._scene.node: self._scene.incarnation}
        group = self._draw()
        while group in self._scene.instances:
            group = self._draw()
        form = proposal(gathering.scope, group, self._tile_bytes, claims, incarnations)
        instance = Instance(form, mine=0, local={claim.rank: claim for claim in claims if claim.local})
        self._bind(gathering, instance)
        self._consent(instance)

    def form_arrived(self, node: str, form: Form) -> None:
        """Take a proposal, or the consent of a member to one."""
        nodes = [member.node for member in form.members]
        mine = nodes.index(self._scene.node) if self._scene.node in nodes else -1
        if (
            not well_formed(form)
            or mine < 0
            or node not in nodes
            or form.members[mine].incarnation != self._scene.incarnation
        ):
            self._scene.ignored += 1
        elif mine == 0 or node != nodes[0] or form.group in self._scene.instances:
            self._consent_arrived(node, form)
        elif self._early_broken.pop(form.group) is None:
            self._proposal_arrived(node, form, mine)

    def _consent_arrived(self, node: str, form: Form) -> None:
        instance = self._scene.instances.get(form.group)
        if instance is None:
            self._early_consents.get_or_add(form.group, set).add(node)
        elif instance.form != form:
            self._scene.ignored += 1
        elif instance.state is State.PROPOSED:
            instance.consents.add(node)
            self._admit_if_agreed(instance)

    def _proposal_arrived(self, node: str, form: Form, mine: int) -> None:
        scope = Scope(form.key, form.proof)
        gathering = self._gatherings.get(scope) or Gathering(scope)
        local = claims_in(form, form.members[mine], gathering)
        instance = Instance(form, mine, local, consents={node, *(self._early_consents.pop(form.group) or ())})
        gone = [rank for rank in form.members[mine].ranks if rank not in local]
        if gone:
            lost = wording.ranks_gone(self._scene.node, gone)
            self._scene.tell_members(instance, Broken(form.group, _NOT_ADMITTED, to_wire(lost)))
            return
        for number in {claim.group for claim in local.values() if claim.group}:
            other = self._scene.instances.get(number)
            if other is not None and other.proposer == node:
                # The proposer has given that one up, and its word on this link comes in order.
                self._dissolve(other, None)
            else:
                busy = wording.bound_elsewhere(self._scene.node)
                self._scene.tell_members(instance, Broken(form.group, _NOT_ADMITTED, to_wire(busy)))
                return
        self._bind(gathering, instance)
        self._consent(instance)

    def _bind(self, gathering: Gathering, instance: Instance) -> None:
        self._scene.add(instance)
        numbers = set(instance.form.clients)
        gathering.obstacle = None
        for claim in gathering:
            if claim.number in numbers:
                claim.group = instance.group

    def _consent(self, instance: Instance) -> None:
        """Consent once every other member can be reached from here; then maybe admit."""
        if instance.consented or self._scene.unreached(instance):
            return
        instance.consented = True
        self._scene.tell_members(instance, instance.form)
        self._admit_if_agreed(instance)

    def _admit_if_agreed(self, instance: Instance) -> None:
        if not instance.consented or any(node not in instance.consents for node, _ in instance.others()):
            return
        scope = instance.scope
        instance.state = State.RUNNING
        instance.since = self._scene.now
        gathering = self._gatherings.get(scope) or Gathering(scope)
        for claim in gathering:
            if claim.group == instance.group:
                gathering.remove(claim)
                if claim.local:
                    # Members too: one that gave the proposal up must not wait for claims that run.
                    self._scene.tell_peers(Retract(scope.key, claim.number, scope.proof))
        started = instance.started()
        self._scene.out.append(TellEngine(started))
        for rank, claim in sorted(instance.local.items()):
            self._scene.out.append(Admit(claim.client, claim.request, rank, started))
        if instance.left:
            self._scene.out.append(TellEngine(RanksLeft(instance.group, tuple(sorted(instance.left)))))
        self._settle(scope)

    # What comes to nothing

    def _dissolve(self, instance: Instance, error: AllReducedError | None, source: str = "") -> None:
        """Give up a proposal: its claims wait again. ``error`` None: the other members know already."""
        self._scene.remove(instance)
        local = tuple(instance.local.values())
        self._dissolved.add(instance.group, local)
        gathering = self._gatherings.get(instance.scope) or Gathering(instance.scope)
        for claim in gathering:
            if claim.group == instance.group:
                claim.group = 0
        if isinstance(error, RankLost | PeerLost):
            why, hint = error.message, error.hint
            if self._scene.unreached(instance):
                why, hint = self._not_agreed(instance), ""
            gathering.obstacle = wording.not_formed(instance.form.key, why, hint)
        # Members that cannot reach each other hear of it from the proposer, which reaches all.
        if error is not None and (not source or instance.mine == 0):
            broken = Broken(instance.group, _NOT_ADMITTED, to_wire(error))
            self._scene.tell_members(instance, broken, but=source)

    def broken_arrived(self, node: str, frame: Broken) -> None:
        """Take what a member says about a proposal, or one that is not known here (any more)."""
        instance = self._scene.instances.get(frame.group)
        if instance is not None:
            self._dissolve(instance, from_wire(frame.error), source=node)
            self._settle(instance.scope)
        elif self._dissolved.get(frame.group) is None:
            self._early_broken.add(frame.group, node)

    def went_on_without(self, group: int, error: AllReducedError) -> None:
        """Take note that members go on with a group that this node did not admit its clients to: their claims end."""
        instance = self._scene.instances.get(group)
        if instance is not None:
            self._dissolve(instance, error)
        self._reject_all(self._dissolved.pop(group) or (), group, error)

    def _reject_all(self, claims: Sequence[Claim], group: int, error: AllReducedError) -> None:
        """Reject claims that still wait after a proposal that other members went on with."""
        for scope, gathering in list(self._gatherings.items()):
            for claim in claims:
                if gathering.get(self._scene.node, claim.number) is claim and claim.group in (0, group):
                    self._reject(gathering, claim, error)
            self._settle(scope)

    def _reject(self, gathering: Gathering, claim: Claim, error: AllReducedError) -> None:
        self._scene.out.append(Reject(claim.client, claim.request, error))
        instance = self._scene.instances.get(claim.group)
        why = self._not_agreed(instance) if instance is not None and isinstance(error, DeadlineExceeded) else ""
        how = f"gave up while its group gathered{': ' if why else ''}{why}"
        self._void(gathering, claim, wording.rank_lost(self._scene.node, [claim], how))

    def _void(self, gathering: Gathering, claim: Claim, why: AllReducedError) -> None:
        gathering.remove(claim)
        self._scene.tell_peers(Retract(gathering.key, claim.number, claim.proof))
        instance = self._scene.instances.get(claim.group)
        if instance is not None:
            del instance.local[claim.rank]
            self._dissolve(instance, why)

    def _refuse(self, gathering: Gathering, claim: Claim, error: AllReducedError) -> None:
        # Not looked at again: its agent retracts it, or answers that it runs already by refusing the local claim.
        gathering.remove(claim)
        self._scene.out.append(SendFrame(claim.node, Refuse(gathering.key, claim.number, to_wire(error), claim.proof)))

    def _proposed(self) -> list[Instance]:
        return [instance for instance in self._scene.instances.values() if instance.state is State.PROPOSED]

    def _draw(self) -> int:
        number = 0
        while not number:
            number = self._draw_number() & (2**63 - 1)
        return number
