"""What becomes of formed groups: ranks leave, ranks and nodes are lost, and the members agree on what follows.

Each loss, and each link that was reset, is trouble for the current generation: its members end it with one change
(``change``), which is installed here. A member that cannot take part in the decision is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

from allreduced.core.errors import AllReducedError, WireError
from allreduced.core.identity import Member
from allreduced.daemon.engine.actions import Frozen
from allreduced.daemon.engine.events import Changed, GroupBroken, GroupForgotten, NodeDeparted, RanksLeft
from allreduced.daemon.losses import brief, error_of
from allreduced.daemon.membership import wording
from allreduced.daemon.membership.actions import SendFrame, TellClients, TellEngine
from allreduced.daemon.membership.change import Agreement, Hopeless, Outcome
from allreduced.daemon.membership.gathering import Claim
from allreduced.daemon.membership.generation import begin_next
from allreduced.daemon.membership.instance import Instance, State
from allreduced.daemon.membership.merge import sound
from allreduced.daemon.membership.recent import Recent
from allreduced.daemon.membership.scene import Scene, Standing
from allreduced.protocol.change import Accept, Change, ChangeFrame, Committed, Loss, Prepare, Trouble
from allreduced.protocol.peer import Left

_CHANGING = (State.RUNNING, State.BROKEN)
_PAST = 64


class Running:
    """The instances that were admitted: running, broken, or without this node."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        # The changes that are under way, by group.
        self._agreements: dict[int, Agreement] = {}
        # The last change of groups that are forgotten here, for members that do not know it.
        self._past: Recent[Committed] = Recent(_PAST)

    # Clients

    def client_leaving(self, client: int, group: int) -> None:
        """Let a client go that leaves on purpose; what its ranks submitted before stays valid."""
        instance = self._scene.instances.get(group)
        if instance is None or instance.state is State.PROPOSED:
            return
        ranks = tuple(claim.rank for claim in self._take(instance, client))
        if ranks:
            self._own_ranks_left(instance, ranks)
            self._forget_if_over(instance)

    def client_gone(self, client: int, doing: str, now: float) -> None:
        """Take note that a client ended without leaving its groups: its ranks are lost to them."""
        for instance in list(self._scene.instances.values()):
            if instance.state is State.PROPOSED:
                continue
            lost = self._take(instance, client)
            if not lost:
                continue
            ranks = tuple(claim.rank for claim in lost)
            if instance.state is State.RUNNING:
                error = wording.rank_lost(self._scene.node, lost, "ended without leaving the group", doing)
                instance.lost.append(Loss(self._scene.node, ranks, whole=False, proven=True, error=brief(error)))
                self._trouble(instance, now)
            else:
                self._own_ranks_left(instance, ranks)
            self._forget_if_over(instance)

    def _own_ranks_left(self, instance: Instance, ranks: tuple[int, ...]) -> None:
        self._ranks_left(instance, ranks)
        if instance.state is not State.CUT_OFF:
            self._scene.tell_members(instance, Left(instance.group, instance.generation, ranks))

    def _take(self, instance: Instance, client: int) -> list[Claim]:
        """Take the claims of a client out of an instance and return them, by rank."""
        taken = sorted((claim for claim in instance.local.values() if claim.client == client), key=lambda c: c.rank)
        for claim in taken:
            del instance.local[claim.rank]
        return taken

    # Peers

    def peer_up(self, node: str, incarnation: int, now: float) -> None:
        """Go on with a member that can be reached again: tell it what it may have missed."""
        for instance in self._scene.instances.values():
            if instance.former.get(node) == incarnation and instance.committed is not None:
                self._scene.out.append(SendFrame(node, instance.committed))
        for instance in self._members_instances(node):
            place = instance.place_of(node)
            if instance.members[place].incarnation != incarnation:
                continue
            instance.silent.pop(place, None)
            if instance.committed is not None:
                self._scene.out.append(SendFrame(node, instance.committed))
            own = tuple(sorted(instance.left.intersection(instance.members[instance.mine].ranks)))
            if own:
                self._scene.out.append(SendFrame(node, Left(instance.group, instance.generation, own)))
            gap = place in instance.gaps
            instance.gaps.discard(place)
            agreement = self._agreements.get(instance.group)
            if agreement is not None:
                agreement.link_back(place)
                self._follow(instance, agreement.reconsider(now), now)
            elif gap and place not in instance.departed:
                self._trouble(instance, now)

    def link_lost(self, node: str, now: float) -> None:
        """Take note that frames from and to a member may be lost; what follows is known when it is back, or dead."""
        for instance in self._members_instances(node):
            instance.gaps.add(instance.place_of(node))
            self._reconsider(instance, now)

    def peer_down(self, node: str, error: AllReducedError | None, *, proven: bool, now: float) -> None:
        """Take note that a member is dead, or silent, or (``error`` None) stopped in order: then its ranks left."""
        for instance in self._members_instances(node):
            place = instance.place_of(node)
            ranks = instance.members[place].ranks
            if place not in instance.departed:
                if error is None:
                    self._ranks_of_others_left(instance, ranks)
                    self._departed(instance, place, brief(wording.stopped(node, ranks)))
                    self._reconsider(instance, now)
                elif proven:
                    self._departed(instance, place, brief(wording.peer_lost(node, ranks, error)))
                    self._trouble(instance, now)
                else:
                    wire = brief(wording.peer_lost(node, ranks, error))
                    instance.silent[place] = Loss(node, ranks, whole=True, proven=False, error=wire)
                    self._trouble(instance, now)
            self._forget_if_over(instance)

    def _members_instances(self, node: str) -> list[Instance]:
        """Return the instances in which this node and that one are members."""
        return [
            instance
            for instance in self._scene.instances.values()
            if instance.state in _CHANGING and instance.place_of(node) not in (-1, instance.mine)
        ]

    def _departed(self, instance: Instance, place: int, error: WireError) -> None:
        member = instance.members[place]
        instance.silent.pop(place, None)
        instance.departed[place] = Loss(member.node, member.ranks, whole=True, proven=True, error=error)
        self._scene.out.append(TellEngine(NodeDeparted(instance.group, member.node)))

    # Frames

    def left_arrived(self, node: str, frame: Left) -> None:
        """Take what a member says about ranks of its own that left."""
        instance = self._scene.instances.get(frame.group)
        if instance is None or not set(frame.ranks) <= set(instance.ranks_of(node)):
            self._scene.ignored += 1
        elif instance.state is State.PROPOSED:
            instance.left.update(frame.ranks)  # the other side is admitted already; told when this one is
        else:
            self._ranks_of_others_left(instance, frame.ranks)
            self._forget_if_over(instance)

    def not_a_member(self, instance: Instance, node: str, error: AllReducedError, now: float) -> None:
        """Take what a node says that was to be a member, but never admitted its clients."""
        if instance not in self._members_instances(node):
            self._scene.ignored += 1
        elif (place := instance.place_of(node)) not in instance.departed:
            self._departed(instance, place, brief(error))
            self._trouble(instance, now)
            self._forget_if_over(instance)

    def change_arrived(self, node: str, frame: ChangeFrame, now: float) -> None:
        """Take a frame about a change of a formed group."""
        instance = self._scene.instances[frame.group]
        place = instance.place_of(node)
        incarnation = self._scene.peers.get(node)
        if instance.former.get(node) == incarnation and place < 0:
            if isinstance(frame, Prepare) and instance.committed is not None:
                self._scene.out.append(SendFrame(node, instance.committed))
        elif place in (-1, instance.mine) or instance.members[place].incarnation != incarnation:
            self._scene.ignored += 1
        elif place in instance.departed:
            pass  # its last words do not count, or two quorums could decide: see docs/failure.md
        elif isinstance(frame, Committed):
            self._committed(instance, node, frame, now)
        elif isinstance(frame, Trouble) and any(loss.node == node and loss.whole for loss in frame.losses):
            self._leaves(instance, place, frame, now)
        elif instance.state is State.CUT_OFF:
            if isinstance(frame, Prepare):
                self._scene.out.append(SendFrame(node, self._departure(instance)))
        elif frame.generation != instance.generation:
            # Whoever is behind hears of the change that it missed.
            if isinstance(frame, Prepare) and frame.generation < instance.generation and instance.committed is not None:
                self._scene.out.append(SendFrame(node, instance.committed))
        else:
            if isinstance(frame, Trouble):
                self._note_departures(instance, frame.losses)
            agreement = self._agreements.get(instance.group) or self._begin(instance, now)
            if isinstance(frame, Accept) and not sound(frame.change, frame.generation, instance.members):
                self._scene.ignored += 1
            else:
                self._follow(instance, agreement.arrived(place, frame, now), now)

    def _leaves(self, instance: Instance, place: int, frame: Trouble, now: float) -> None:
        """Take a member's word that it votes no more, in whatever generation it is."""
        if instance.state not in _CHANGING:
            return
        self._departed(instance, place, next(loss.error for loss in frame.losses if loss.whole))
        self._trouble(instance, now)
        self._forget_if_over(instance)

    def frozen(self, frozen: Frozen, now: float) -> None:
        """Take the engine's answer to Freeze."""
        instance = self._scene.instances.get(frozen.group)
        agreement = self._agreements.get(frozen.group)
        if instance is not None and agreement is not None:
            self._follow(instance, agreement.frozen(frozen, now), now)

    def _note_departures(self, instance: Instance, losses: Sequence[Loss]) -> None:
        for loss in losses:
            place = instance.place_of(loss.node)
            if loss.whole and loss.proven and place not in (-1, instance.mine) and place not in instance.departed:
                self._departed(instance, place, loss.error)

    # Changes

    def _trouble(self, instance: Instance, now: float) -> None:
        """Tell all members why the generation cannot go on, and take part in its end."""
        if instance.state not in _CHANGING:
            return
        trouble = Trouble(instance.group, instance.generation, instance.known_losses())
        self._scene.tell_members(instance, trouble)
        self._begin(instance, now)
        self._reconsider(instance, now)

    def _begin(self, instance: Instance, now: float) -> Agreement:
        """Take part in the end of the generation, from now on or already, with new patience."""
        patience = self._scene.timing.give_up
        agreement = self._agreements.get(instance.group)
        if agreement is None:
            agreement = self._agreements[instance.group] = Agreement(self._scene, instance)
            instance.give_up_last = now + patience * len(instance.members)
        # Each loss may take its time, but a member that comes and goes must not hold up the others for ever.
        instance.give_up_at = min(now + patience, instance.give_up_last)
        return agreement

    def _reconsider(self, instance: Instance, now: float) -> None:
        agreement = self._agreements.get(instance.group)
        if agreement is not None:
            self._follow(instance, agreement.reconsider(now), now)

    def awaited(self, group: int) -> tuple[str, ...] | None:
        """Return the nodes whose part in the change that is under way is missing; None where there is none."""
        agreement = self._agreements.get(group)
        return agreement.awaited() if agreement is not None else None

    def _follow(self, instance: Instance, outcome: Outcome, now: float) -> None:
        match outcome:
            case Change():
                self._install(instance, Committed(instance.group, instance.generation, outcome), "", now)
            case Hopeless():
                losses = [*instance.departed.values(), *instance.silent.values()]
                self._cut_off(instance, wording.no_quorum(instance.form.key, self._scene.node, losses))
            case None:
                pass

    def _committed(self, instance: Instance, node: str, frame: Committed, now: float) -> None:
        if frame.generation < instance.generation:
            return  # installed already
        if frame.generation == instance.generation and not sound(frame.change, frame.generation, instance.members):
            self._scene.ignored += 1
            return
        self._install(instance, frame, node, now)

    def _install(self, instance: Instance, committed: Committed, source: str, now: float) -> None:
        """Begin the next generation, or end here. Whoever learns of a change tells all others once."""
        change = committed.change
        if instance.state is State.CUT_OFF and instance.committed is not None:
            return
        self._scene.tell_members(instance, committed, but=source)
        mine = next((place for place, member in enumerate(change.members) if self._is_me(member)), -1)
        out = mine < 0 or committed.generation > instance.generation or instance.state is State.CUT_OFF
        instance.committed = committed
        self._agreements.pop(instance.group, None)
        instance.give_up_at = None
        instance.left.update(change.left)
        self._scene.out.append(TellEngine(Changed(instance.group, committed.generation, change)))
        untold = tuple(sorted(instance.untold.difference(change.left)))
        instance.untold.clear()
        if untold:
            self._scene.out.append(TellEngine(RanksLeft(instance.group, untold)))
        if out:
            instance.state = State.CUT_OFF
            if change.losses:
                self._end(instance, error_of(change.losses))
        else:
            begin_next(self._scene, instance, change, mine)
            if change.ended:
                self._ended(instance)
            # What became known while the change was under way, and is not in it.
            if instance.lost or instance.departed or instance.silent:
                self._trouble(instance, now)
        self._forget_if_over(instance)

    def _is_me(self, member: Member) -> bool:
        return member.node == self._scene.node and member.incarnation == self._scene.incarnation

    def _ended(self, instance: Instance) -> None:
        """Tell the clients that their group runs nothing more: its members agreed on that, now or before."""
        late, instance.lost = instance.lost, []
        if late:  # they are not told as losses any more, but must not be waited for
            self._own_ranks_left(instance, tuple(sorted(rank for loss in late for rank in loss.ranks)))
        if instance.state is State.RUNNING:
            instance.state = State.BROKEN
            self._end(instance, error_of(instance.losses))

    def _end(self, instance: Instance, error: AllReducedError) -> None:
        instance.error = error
        if instance.local:
            self._scene.out.append(TellClients(instance.clients(), instance.group, error))

    def give_up(self, group: int, error: AllReducedError) -> None:
        """Leave a group whose agreement this node's engine cannot keep; or tell the clients a better error."""
        instance = self._scene.instances.get(group)
        if instance is None:
            # All its clients left; only the engine still had something to settle with members that are gone.
            self._scene.out.append(TellEngine(GroupBroken(group, error)))
        elif instance.state is State.PROPOSED:
            pass  # the engine does not know it
        elif instance.state is State.CUT_OFF:
            self._end(instance, error)
        else:
            self._cut_off(instance, error)

    def _cut_off(self, instance: Instance, error: AllReducedError) -> None:
        """End the group here without the others, and tell them that this node votes no more."""
        was = instance.state
        instance.state = State.CUT_OFF
        instance.error = instance.error or error
        self._agreements.pop(instance.group, None)
        instance.give_up_at = None
        self._scene.tell_members(instance, self._departure(instance))
        self._scene.out.append(TellEngine(GroupBroken(instance.group, error)))
        if was is State.RUNNING:
            self._end(instance, error)
        self._forget_if_over(instance)

    def _departure(self, instance: Instance) -> Trouble:
        member = instance.members[instance.mine]
        error = instance.error or wording.not_in_group(member.node, member.ranks)
        loss = Loss(member.node, member.ranks, whole=True, proven=True, error=brief(error))
        return Trouble(instance.group, instance.generation, (loss,))

    def refuse(self, node: str, frame: Prepare | Trouble) -> None:
        """Answer somebody who takes this node for a member of a group that it does not have (any more)."""
        past = self._past.get(frame.group)
        if past is not None:
            self._scene.out.append(SendFrame(node, past))
        error = brief(wording.not_in_group(self._scene.node))
        loss = Loss(self._scene.node, (), whole=True, proven=True, error=error)
        self._scene.out.append(SendFrame(node, Trouble(frame.group, frame.generation, (loss,))))

    # Time

    def time_passed(self, now: float) -> None:
        """Do what is due."""
        for group in list(self._agreements):
            agreement = self._agreements.get(group)
            if agreement is None:
                continue  # it went with another one
            instance = self._scene.instances[group]
            if instance.give_up_at is not None and now >= instance.give_up_at:
                missing = [
                    member
                    for place, member in enumerate(instance.members)
                    if self._scene.standing(instance, place) is not Standing.UP
                ]
                seconds = self._scene.timing.give_up
                self._cut_off(instance, wording.undecided(instance.form.key, self._scene.node, seconds, missing))
            else:
                self._follow(instance, agreement.time_passed(now), now)

    def next_deadline(self) -> float | None:
        """Return when :meth:`time_passed` is due, None where nothing waits."""
        times = [
            at
            for group, agreement in self._agreements.items()
            for at in (self._scene.instances[group].give_up_at, agreement.due)
            if at is not None
        ]
        return min(times, default=None)

    # The end

    def _ranks_left(self, instance: Instance, ranks: Sequence[int]) -> None:
        new = tuple(sorted(set(ranks) - instance.left))
        if new:
            instance.left.update(new)
            self._scene.out.append(TellEngine(RanksLeft(instance.group, new)))

    def _ranks_of_others_left(self, instance: Instance, ranks: Sequence[int]) -> None:
        """Take note that ranks of another member left.

        The engine takes a rank that left for one that calls nothing any more, and fails what it has not called. While
        the generation ends that may be wrong: what the rank called last may have been lost with a link.
        """
        if instance.group in self._agreements:
            instance.untold.update(set(ranks) - instance.left)
            instance.left.update(ranks)
        else:
            self._ranks_left(instance, ranks)

    def _forget_if_over(self, instance: Instance) -> None:
        """Forget a group in which no client of this node is, once no other member can need it either."""
        if instance.local or self._scene.instances.get(instance.group) is not instance:
            return
        if instance.state is not State.CUT_OFF and self._needed(instance):
            return
        self._scene.remove(instance)
        if instance.committed is not None:
            self._past.add(instance.group, instance.committed)
        if self._agreements.pop(instance.group, None) is not None:
            # The engine may be frozen, and nobody would tell it how what is in flight ended.
            error = wording.not_in_group(self._scene.node)
            self._scene.out.append(TellEngine(GroupBroken(instance.group, error)))
        self._scene.out.append(TellEngine(GroupForgotten(instance.group)))

    def _needed(self, instance: Instance) -> bool:
        """Tell whether a member that may live has a rank that has not left: it may lack results that are kept here."""
        gone = {rank for loss in instance.losses for rank in loss.ranks} | instance.left
        return any(
            not gone.issuperset(member.ranks)
            for place, member in enumerate(instance.members)
            if place != instance.mine and self._scene.standing(instance, place) in (Standing.UP, Standing.CUT)
        )
