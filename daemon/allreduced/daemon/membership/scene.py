"""What the parts of the memberships share: who this node is, who can be reached, which groups there are."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from allreduced.core.identity import GroupKey
from allreduced.daemon.membership.actions import Action, SendFrame
from allreduced.daemon.membership.gathering import Claim, Scope
from allreduced.daemon.membership.instance import Instance, State
from allreduced.daemon.timing import Timing
from allreduced.protocol.peer import MembershipFrame


class Standing(enum.Enum):
    """What is known of a member here, which decides whether a change waits for it."""

    UP = "there is a link"
    CUT = "its link ended; it may come back"
    SILENT = "it was silent for too long; it may live"
    DEPARTED = "it is proven to be dead, or has left"


class Scene:
    """The state of one node's memberships, and the actions made so far during one event.

    ``peers``: incarnation of each agent that can be reached; ``cut``: of those whose link ended and that may come back.
    ``instances``: by number, proposed ones too; changed by :meth:`add` and :meth:`remove`. ``ignored`` counts frames
    that made no sense.
    ``now``: the time of the event.
    """

    def __init__(self, node: str, incarnation: int, timing: Timing) -> None:
        self.node = node
        self.incarnation = incarnation
        self.timing = timing
        self.now = 0.0
        self.peers: dict[str, int] = {}
        self.cut: dict[str, int] = {}
        self.instances: dict[int, Instance] = {}
        self._of_key: dict[GroupKey, dict[int, Instance]] = {}
        self.ignored = 0
        self.out: list[Action] = []

    def add(self, instance: Instance) -> None:
        """Take a new instance."""
        self.instances[instance.group] = instance
        self._of_key.setdefault(instance.form.key, {})[instance.group] = instance

    def remove(self, instance: Instance) -> None:
        """Forget an instance."""
        del self.instances[instance.group]
        same = self._of_key[instance.form.key]
        del same[instance.group]
        if not same:
            del self._of_key[instance.form.key]

    def instances_of(self, key: GroupKey) -> Iterable[Instance]:
        """Return the instances of one group, which runs, ended, or is proposed by several."""
        return self._of_key.get(key, {}).values()

    def tell_peers(self, frame: MembershipFrame) -> None:
        """Send a frame to every agent that can be reached."""
        self.out.extend(SendFrame(node, frame) for node in self.peers)

    def tell_members(self, instance: Instance, frame: MembershipFrame, but: str = "") -> None:
        """Send a frame to the other members that can be reached, except the node ``but``."""
        for node, incarnation in instance.others():
            if node != but and self.peers.get(node) == incarnation:
                self.out.append(SendFrame(node, frame))

    def unreached(self, instance: Instance) -> list[str]:
        """Return the other members that have no link here, or one to another start of their agent."""
        return [node for node, incarnation in instance.others() if self.peers.get(node) != incarnation]

    def standing(self, instance: Instance, place: int) -> Standing:
        """Return what is known of the member at ``place``; this node itself is up."""
        member = instance.members[place]
        if place in instance.departed:
            return Standing.DEPARTED
        if place == instance.mine or self.peers.get(member.node) == member.incarnation:
            return Standing.UP
        return Standing.CUT if self.cut.get(member.node) == member.incarnation else Standing.SILENT

    def running_holder(self, scope: Scope, rank: int) -> Claim | None:
        """Return the claim of this node's that holds the rank in a running group, if one does."""
        for instance in self.instances_of(scope.key):
            if instance.state is State.RUNNING and instance.scope == scope and rank in instance.local:
                return instance.local[rank]
        return None
