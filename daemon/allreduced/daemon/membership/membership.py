"""The memberships of one node: takes events apart and sees to the order of what follows from them."""

from __future__ import annotations

from collections.abc import Callable

from allreduced.core.errors import AllReducedError, PeerLost, from_wire
from allreduced.daemon.membership.actions import Action, SetTimer
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
from allreduced.daemon.membership.forming import NOT_ADMITTED, Forming
from allreduced.daemon.membership.gathering import Gathering
from allreduced.daemon.membership.instance import GatheringView, GroupView, Snapshot, State
from allreduced.daemon.membership.running import Running
from allreduced.daemon.membership.scene import Scene
from allreduced.protocol.peer import Announce, Broken, Form, Left, MembershipFrame, Refuse, Retract


class Membership:
    """The memberships of one node. The same events give the same actions.

    ``tile_bytes`` holds for the groups that this node proposes. ``draw`` returns random numbers (at least 63 bits are
    used), for the numbers of claims and groups.
    """

    def __init__(self, node: str, incarnation: int, tile_bytes: int, draw: Callable[[], int]) -> None:
        self._scene = Scene(node, incarnation)
        self._forming = Forming(self._scene, tile_bytes, draw)
        self._running = Running(self._scene)
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
                self._running.client_gone(event.client)
            case PeerUp():
                self._peer_up(event.node, event.incarnation)
            case PeerDown():
                self._peer_down(event.node, event.error)
            case FrameArrived():
                self._frame_arrived(event.node, event.frame)
            case TimePassed():
                pass  # deadlines are looked at after every event
        self._forming.expire(now)
        self._set_timer()
        out, scene.out = scene.out, []
        return out

    def snapshot(self) -> Snapshot:
        """Return what is known right now, for ``status``."""
        scene = self._scene
        return Snapshot(
            groups=tuple(
                GroupView(
                    group=instance.group,
                    key=instance.form.key,
                    state=instance.state.value,
                    size=len(instance.form.clients),
                    members=instance.form.members,
                    local=tuple((rank, claim.client, claim.pid) for rank, claim in sorted(instance.local.items())),
                    left=tuple(sorted(instance.left)),
                    generation=instance.form.generation,
                    error=instance.error,
                )
                for instance in scene.instances.values()
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

    def _silent(self, gathering: Gathering) -> list[str]:
        """Return the agents whose consent to the proposal for these claims is missing; none where there is none."""
        numbers = {claim.group for claim in gathering}
        instances = [self._scene.instances[number] for number in numbers if number in self._scene.instances]
        return sorted({node for one in instances for node, _ in one.others() if node not in one.consents})

    def _peer_up(self, node: str, incarnation: int) -> None:
        known = self._scene.peers.get(node)
        if known is not None and known != incarnation:
            self._peer_down(node, PeerLost(f"agent {node!r} was started anew", nodes=(node,)))
        self._scene.peers[node] = incarnation
        self._forming.peer_up(node, incarnation)

    def _peer_down(self, node: str, error: AllReducedError | None) -> None:
        self._scene.peers.pop(node, None)
        # Formed groups first: the claims that wait may be for ranks that they held.
        for instance in list(self._scene.instances.values()):
            if node != self._scene.node and instance.ranks_of(node):
                self._running.peer_down(instance, node, error)
        self._forming.peer_down(node, error)

    def _frame_arrived(self, node: str, frame: MembershipFrame) -> None:
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
                self._broken_arrived(node, frame)
            case Left():
                self._running.left_arrived(node, frame)

    def _broken_arrived(self, node: str, frame: Broken) -> None:
        instance = self._scene.instances.get(frame.group)
        if instance is not None and not instance.ranks_of(node):
            self._scene.ignored += 1
        elif instance is None or instance.state is State.PROPOSED:
            self._forming.broken_arrived(node, frame)
        elif instance.state is State.RUNNING:
            told = frame.generation != NOT_ADMITTED
            self._running.end(instance, from_wire(frame.error), source=node, told=told)

    def _set_timer(self) -> None:
        at = self._forming.next_deadline()
        if at != self._timer:
            self._timer = at
            self._scene.out.append(SetTimer(at))
