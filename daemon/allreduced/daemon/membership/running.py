"""What becomes of formed groups: ranks leave, ranks and nodes are lost, and in the end nobody is left."""

from __future__ import annotations

from collections.abc import Sequence

from allreduced.core.errors import AllReducedError, to_wire
from allreduced.daemon.engine.events import GroupBroken, GroupForgotten, RanksLeft
from allreduced.daemon.membership import wording
from allreduced.daemon.membership.actions import TellClients, TellEngine
from allreduced.daemon.membership.gathering import Claim
from allreduced.daemon.membership.instance import Instance, State
from allreduced.daemon.membership.scene import Scene
from allreduced.protocol.peer import Broken, Left


class Running:
    """The instances that were admitted, running or broken."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def client_leaving(self, client: int, group: int) -> None:
        """Let a client go that leaves on purpose; what its ranks submitted before stays valid."""
        instance = self._scene.instances.get(group)
        if instance is None or instance.state is State.PROPOSED:
            return
        ranks = tuple(claim.rank for claim in self._take(instance, client))
        if not ranks:
            return
        if instance.state is State.RUNNING:
            instance.left.update(ranks)
            self._scene.out.append(TellEngine(RanksLeft(group, ranks)))
            self._scene.tell_members(instance, Left(group, instance.form.generation, ranks))
        self._forget_if_empty(instance)

    def client_gone(self, client: int, doing: str = "") -> None:
        """Break the groups of a client that ended without leaving them; ``doing``: what it did, in words."""
        for instance in list(self._scene.instances.values()):
            if instance.state is State.PROPOSED:
                continue
            lost = self._take(instance, client)
            if not lost:
                continue
            if instance.state is State.RUNNING:
                self.end(instance, wording.rank_lost(self._scene.node, lost, "ended without leaving the group", doing))
            self._forget_if_empty(instance)

    def peer_down(self, instance: Instance, node: str, error: AllReducedError | None) -> None:
        """Take note that a member is dead, or (``error`` None) stopped in order: then its ranks have left."""
        if instance.state is not State.RUNNING:
            return
        ranks = instance.ranks_of(node)
        if error is None:
            self._ranks_left(instance, ranks)
        else:
            self.end(instance, wording.peer_lost(node, ranks, error))

    def left_arrived(self, node: str, frame: Left) -> None:
        """Take what a member says about ranks of its own that left."""
        instance = self._scene.instances.get(frame.group)
        if instance is None or not set(frame.ranks) <= set(instance.ranks_of(node)):
            self._scene.ignored += 1
        elif instance.state is State.PROPOSED:
            instance.left.update(frame.ranks)  # the other side is admitted already; told when this one is
        elif instance.state is State.RUNNING:
            self._ranks_left(instance, frame.ranks)

    def end(self, instance: Instance, error: AllReducedError, source: str = "", *, told: bool = False) -> None:
        """Break a running group. ``source``: who said so; ``told``: it has told all members."""
        instance.state = State.BROKEN
        instance.error = error
        self._scene.out.append(TellEngine(GroupBroken(instance.group, error)))
        if instance.local:
            self._scene.out.append(TellClients(instance.clients(), instance.group, error))
        if not told:
            broken = Broken(instance.group, instance.form.generation, to_wire(error))
            self._scene.tell_members(instance, broken, but=source)

    def _take(self, instance: Instance, client: int) -> list[Claim]:
        """Take the claims of a client out of an instance and return them, by rank."""
        taken = sorted((claim for claim in instance.local.values() if claim.client == client), key=lambda c: c.rank)
        for claim in taken:
            del instance.local[claim.rank]
        return taken

    def _ranks_left(self, instance: Instance, ranks: Sequence[int]) -> None:
        new = tuple(sorted(set(ranks) - instance.left))
        if new:
            instance.left.update(new)
            self._scene.out.append(TellEngine(RanksLeft(instance.group, new)))

    def _forget_if_empty(self, instance: Instance) -> None:
        if not instance.local:
            del self._scene.instances[instance.group]
            self._scene.out.append(TellEngine(GroupForgotten(instance.group)))
