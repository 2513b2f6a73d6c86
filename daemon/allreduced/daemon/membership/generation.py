"""How an instance goes from one generation to the next: what is known of its members comes along."""

from __future__ import annotations

from allreduced.daemon.engine.events import NodeDeparted
from allreduced.daemon.membership.actions import TellEngine
from allreduced.daemon.membership.instance import Instance
from allreduced.daemon.membership.scene import Scene, Standing
from allreduced.protocol.change import Change


def begin_next(scene: Scene, instance: Instance, change: Change, mine: int) -> None:
    """Make the members of a change those of the instance; ``mine``: this node's place among them."""
    places = {member.node: place for place, member in enumerate(change.members)}
    told = {rank for loss in change.losses for rank in loss.ranks}
    instance.former.update(
        (member.node, member.incarnation) for member in instance.members if member.node not in places
    )
    instance.generation, instance.members, instance.mine = change.generation, change.members, mine
    for known in (instance.departed, instance.silent):
        still = {places[loss.node]: loss for loss in known.values() if loss.node in places}
        known.clear()
        known.update(still)
    for place in instance.departed:
        scene.out.append(TellEngine(NodeDeparted(instance.group, change.members[place].node)))
    instance.lost = [loss for loss in instance.lost if not told.issuperset(loss.ranks)]
    # What is sent to them from here on is lost, so there is trouble when they are back.
    instance.gaps = {place for place in range(len(places)) if scene.standing(instance, place) is Standing.CUT}
    if change.ended:
        instance.losses = change.losses
