"""What a defect in this agent touches: whose answers and which groups end, so that nobody waits for ever.

Nobody knows in which state an exception left the engine or the memberships. Everything that the event or the action was
about ends with an error; where that cannot be told, every group does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from allreduced.core.errors import InternalError
from allreduced.daemon.engine import actions as engine_actions
from allreduced.daemon.engine import events as engine_events
from allreduced.daemon.membership import actions as membership_actions
from allreduced.daemon.membership import events as membership_events

Action: TypeAlias = "engine_actions.Action | membership_actions.Action"
Event: TypeAlias = "engine_events.Event | membership_events.Event"
Groups: TypeAlias = "Mapping[int, engine_events.GroupStarted]"


def defect() -> InternalError:
    """Return the error that everything ends with."""
    return InternalError(
        "a defect in this node's agent ended this", hint="the agent's log has the traceback; please report it"
    )


def touched_by_event(event: Event, groups: Groups) -> tuple[int, ...]:
    """Return the groups that may be in any state after the handling of ``event`` failed."""
    match event:
        case engine_events.GroupBroken() | engine_events.GroupForgotten() | membership_events.GiveUp():
            return ()  # the group is at its end, and breaking it is what failed
        case membership_events.ClientJoining():
            return ()  # only the client's claim is
        case (
            engine_events.Submitted(group=group)
            | engine_events.GroupStarted(group=group)
            | engine_events.Freeze(group=group)
            | engine_events.Changed(group=group)
            | engine_events.NodeDeparted(group=group)
            | engine_events.RanksLeft(group=group)
            | membership_events.ClientLeaving(group=group)
        ):
            return (group,)
        case membership_events.Frozen(frozen=frozen):
            return (frozen.group,)
        case engine_events.FrameArrived(frame=frame) | membership_events.FrameArrived(frame=frame):
            return _group_of(frame)
        case membership_events.ClientGone(client=client):
            return tuple(group for group, started in groups.items() if client in started.local.values())
        case _:
            return tuple(groups)


def touched_by_action(action: Action, groups: Groups, group_of: Callable[[int], int]) -> tuple[int, ...]:
    """Return the groups that may wait for ever after ``action`` could not be done.

    ``group_of`` returns the group of a buffer, 0 where it is none's own.
    """
    match action:
        case engine_actions.Reduce(target=region) | engine_actions.PostReceive(region=region):
            return _around(group_of(region.buffer), groups)
        case engine_actions.Send(region=region):
            return _around(group_of(region.buffer), groups)
        case engine_actions.SendFrame(frame=frame) | membership_actions.SendFrame(frame=frame):
            return _group_of(frame)
        case engine_actions.CancelReceive() | engine_actions.CancelSend():
            return tuple(groups)
        case engine_actions.Frozen(group=group) | engine_actions.GiveUp(group=group):
            return (group,)
        case _:
            return ()


def _around(group: int, groups: Groups) -> tuple[int, ...]:
    return (group,) if group in groups else tuple(groups)


def _group_of(frame: object) -> tuple[int, ...]:
    group = getattr(frame, "group", None)
    return (group,) if isinstance(group, int) else ()
