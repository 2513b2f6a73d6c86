"""The memberships of one node: takes events apart and sees to the order of what follows from them."""

from __future__ import annotations

from collections.abc import Callable

from allreduced.core.errors import AllReducedError, PeerLost, from_wire
from allreduced.daemon.membership import wording
from allreduced.daemon.membership.actions import Action, SetTimer
from allreduced.daemon.membership.events import (
    ClientGone,
    ClientJoining,
    ClientLeaving,
    Event,
    FrameArrived,
    Frozen,
    GiveUp,
    LinkLost,
    PeerDown,
    PeerUp,
    TimePassed,
)
from allreduced.daemon.membership.forming import Forming
from allreduced.daemon.membership.gathering import Gathering
from allreduced.daemon.membership.instance import GatheringView, GroupView, Instance, Snapshot, State
from allreduced.daemon.membership.running import Running
from allreduced.daemon.membership.scene import Scene
from allreduced.daemon.timing import Timing
from allreduced.protocol.change import ChangeFrame, Committed, Prepare, Trouble
from allreduced.protocol.peer import Announce, Broken, Form, Left, MembershipFrame, Refuse, Retract

_EARLY = 256
"""Frames about changes that are kept for a proposal at most."""


class Membership:
    """The memberships of one node. The same events give the same actions.

    ``tile_bytes`` holds for the groups that this node proposes. ``draw`` returns random numbers (at least 63 bits are
    used), for the numbers of claims and groups. ``timing``: when changes of groups are tried again, and given up.
    """

    def __init__(
        self,
        node: str,
        incarnation: int,
        tile_bytes: int,
        draw: Callable[[], int],
        timing: Timing,
    ) -> None:
        self._scene = Scene(node, incarnation, timing)
        self._forming = Forming(self._scene, tile_bytes, draw)
        self._running = Running(self._scene)
        # Others were admitted a little earlier, and there is trouble already.
        self._early: dict[int, list[tuple[str, ChangeFrame]]] = {}
        self._timer: float | None = None

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event at time ``now`` and return what is to be done, in order. Never raises for what peers say."""
        scene = self._scene
        scene.out = []
        scene.now = now
        match event:
            case ClientJoining():
                self._forming.client_joining(event)
            case ClientLeaving():
                self._running.client_leaving(event.client, event.group)
            case ClientGone():
                self._forming.client_gone(event.client)
                self._running.client_gone(event.client, event.doing, now)
            case PeerUp():
                self._peer_up(event.node, event.incarnation, now)
            case LinkLost():
                self._link_lost(event.node, now)
            case PeerDown():
                self._peer_down(event.node, event.error, proven=event.proven, now=now)
            case FrameArrived():
                self._frame_arrived(event.node, event.frame, now)
            case Frozen():
                self._running.frozen(event.frozen, now)
            case GiveUp():
                self._running.give_up(event.group, event.error)
            case TimePassed():
                pass  # what is due is looked at after every event
        self._running.time_passed(now)
        self._forming.expire(now)
        if self._early:
            self._take_early(now)
        self._set_timer()
        out, scene.out = scene.out, []
        return out

    def snapshot(self) -> Snapshot:
        """Return what is known right now, for ``status``."""
        scene = self._scene
        return Snapshot(
            groups=tuple(
                self._view(instance)
                for instance in scene.instances.values()
                if instance.local  # others are kept for the sake of other members only
            ),
            gatherings=tuple(
                GatheringView(
                    key=gathering.key,
                    size=size,
                    ranks=tuple(sorted((claim.rank, claim.node, claim.pid, claim.since) for claim in gathering)),
                    silent=tuple(self._silent(gathering)),
                )
                for gathering in self._forming.gatherings
                for size in [max((claim.size for claim in gathering), default=0)]
            ),
            peers=tuple(sorted(scene.peers.items())),
            ignored=scene.ignored,
        )

    def _view(self, instance: Instance) -> GroupView:
        awaited = self._running.awaited(instance.group)
        return GroupView(
            group=instance.group,
            key=instance.form.key,
            generation=instance.generation,
            state=instance.state.value if awaited is None else "changing",
            size=len(instance.form.clients),
            members=instance.form.members,
            local=tuple((rank, claim.client, claim.pid) for rank, claim in sorted(instance.local.items())),
            left=tuple(sorted(instance.left)),
            error=instance.error,
            awaited=awaited or (),
        )

    def _silent(self, gathering: Gathering) -> list[str]:
        """Return the agents whose consent to the proposal for these claims is missing; none where there is none."""
        numbers = {claim.group for claim in gathering}
        instances = [self._scene.instances[number] for number in numbers if number in self._scene.instances]
        return sorted({node for one in instances for node, _ in one.others() if node not in one.consents})

    def _peer_up(self, node: str, incarnation: int, now: float) -> None:
        scene = self._scene
        known = scene.peers.get(node, scene.cut.get(node))
        if known is not None and known != incarnation:
            error = PeerLost(f"agent {node!r} was started anew", nodes=(node,))
            self._peer_down(node, error, proven=True, now=now)
        scene.cut.pop(node, None)
        scene.peers[node] = incarnation
        # Members hear first of the change that they missed, then of what follows from it.
        self._running.peer_up(node, incarnation, now)
        self._forming.peer_up(node, incarnation)

    def _link_lost(self, node: str, now: float) -> None:
        scene = self._scene
        if node not in scene.peers:
            return
        scene.cut[node] = scene.peers.pop(node)
        self._running.link_lost(node, now)
        # What gathers does not wait for the peer: it says again what it has when it is back.
        self._forming.peer_down(node, PeerLost(f"the link to agent {node!r} was lost", nodes=(node,)))

    def _peer_down(self, node: str, error: AllReducedError | None, *, proven: bool, now: float) -> None:
        self._scene.peers.pop(node, None)
        self._scene.cut.pop(node, None)
        # Formed groups first: the claims that wait may be for ranks that they held.
        self._running.peer_down(node, error, proven=proven, now=now)
        self._forming.peer_down(node, error)

    def _frame_arrived(self, node: str, frame: MembershipFrame, now: float) -> None:
        if node not in self._scene.peers:
            self._scene.ignored += 1
            return
        match frame:
            case Announce():
                self._forming.announced(node, frame)
            case Retract():
                self._forming.retracted(node, frame)
            case Refuse():
                self._forming.refused(frame)
            case Form():
                self._forming.form_arrived(node, frame)
            case Broken():
                self._broken_arrived(node, frame, now)
            case Left():
                self._running.left_arrived(node, frame)
            case _:
                self._change_arrived(node, frame, now)

    def _broken_arrived(self, node: str, frame: Broken, now: float) -> None:
        instance = self._scene.instances.get(frame.group)
        if instance is not None and instance.place_of(node) < 0:
            self._scene.ignored += 1
        elif instance is None or instance.state is State.PROPOSED:
            self._forming.broken_arrived(node, frame)
        else:
            self._running.not_a_member(instance, node, from_wire(frame.error), now)

    def _change_arrived(self, node: str, frame: ChangeFrame, now: float) -> None:
        instance = self._scene.instances.get(frame.group)
        if instance is not None and instance.state is not State.PROPOSED:
            self._running.change_arrived(node, frame, now)
            return
        if instance is not None and instance.consented:
            # The consents that are missing here are on their way, or their link ends and the proposal with it.
            early = self._early.setdefault(frame.group, [])
            if len(early) < _EARLY:
                early.append((node, frame))
            return
        if isinstance(frame, Trouble | Prepare | Committed):
            self._forming.went_on_without(frame.group, wording.went_on_without(frame))
        departs = isinstance(frame, Trouble) and any(loss.whole and loss.node == node for loss in frame.losses)
        if isinstance(frame, Prepare | Trouble) and not departs:
            self._running.refuse(node, frame)

    def _take_early(self, now: float) -> None:
        """Take the frames about changes of groups that are formed by now, or that came to nothing."""
        for group, frames in list(self._early.items()):
            instance = self._scene.instances.get(group)
            if instance is not None and instance.state is State.PROPOSED:
                continue
            del self._early[group]
            for node, frame in frames:
                if node in self._scene.peers:
                    self._change_arrived(node, frame, now)

    def _set_timer(self) -> None:
        times = (self._forming.next_deadline(), self._running.next_deadline())
        at = min((time for time in times if time is not None), default=None)
        if at != self._timer:
            self._timer = at
            self._scene.out.append(SetTimer(at))
