"""What the engine tells about itself: plain data for ``allreduced status``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import TypedDict

from allreduced.core.errors import AllReducedError
from allreduced.core.identity import GroupKey, Member
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.events import Submitted
from allreduced.daemon.engine.group import Group
from allreduced.daemon.engine.leases import Leases
from allreduced.daemon.engine.memory import Memory
from allreduced.daemon.engine.operation import Operation, State
from allreduced.protocol.peer import Call, Fingerprint


class OperationInfo(TypedDict):
    """One operation in flight. Times in seconds; ``arrivals``: rank to seconds since the first one here.

    ``calls``: what local ranks called. ``waits_for``, ``nodes``: as in ``protocol.status.OperationReport``.
    """

    name: str
    use: int
    state: str
    calls: tuple[Call, ...]
    waits_for: str
    nodes: list[str]
    age: float
    deadline_in: float | None
    arrivals: dict[int, float]
    missing: list[int]


class FailedInfo(TypedDict):
    """An operation that failed, and the local ranks that get this error when they call it."""

    name: str
    use: int
    error: AllReducedError
    waiting: list[int]


class HeldInfo(TypedDict):
    """A call that waits until the members agree which names are forgotten; ``nodes`` have not answered."""

    name: str
    rank: int
    fingerprint: Fingerprint
    deadline_in: float
    nodes: list[str]


class GroupInfo(TypedDict):
    """One group on this node. ``names``: whose uses are counted; ``failed``: kept for local ranks that come late.

    ``more``: operations in flight that are not told.
    """

    key: GroupKey
    generation: int
    size: int
    ranks: list[int]
    members: tuple[Member, ...]
    left: list[int]
    error: AllReducedError | None
    operations: list[OperationInfo]
    more: int
    held: list[HeldInfo]
    failed: list[FailedInfo]
    ending: int
    names: int


class Snapshot(TypedDict):
    """The whole engine."""

    node: str
    groups: dict[int, GroupInfo]
    memory: dict[str, int]
    leases: dict[int, dict[str, int]]
    outstanding: dict[str, int]
    counters: dict[str, int]


def take_snapshot(
    context: Context,
    groups: Mapping[int, Group],
    memory: Memory,
    leases: Leases,
    early: int,
    now: float,
    each: int | None,
) -> Snapshot:
    """Return the state of the engine at ``now`` as plain data; changes nothing.

    ``each``: operations that are told of each group, all where it is None.
    """
    return {
        "node": context.node,
        "groups": {number: _group(context, group, now, each) for number, group in groups.items()},
        "memory": memory.snapshot(),
        "leases": leases.snapshot(),
        "outstanding": {
            "receives": len(context.receives),
            "sends": len(context.sends),
            "jobs": len(context.jobs),
            "early_frames": early,
        },
        "counters": dict(context.counters),
    }


def _group(context: Context, group: Group, now: float, each: int | None) -> GroupInfo:
    return {
        "key": group.key,
        "generation": group.generation,
        "size": group.size,
        "ranks": list(group.ranks),
        "members": group.members,
        "left": sorted(group.left),
        "error": group.error,
        "operations": [_operation(context, operation, now) for operation in islice(group.operations.values(), each)],
        "more": max(len(group.operations) - each, 0) if each is not None else 0,
        "held": [
            {
                "name": submit.name,
                "rank": submit.rank,
                "fingerprint": submit.fingerprint,
                "deadline_in": submit.deadline_at - now,
                "nodes": list(group.forgetting.silent),
            }
            for submit in islice(group.forgetting.held, each)
            if isinstance(submit, Submitted)
        ],
        "failed": [
            {"name": name, "use": use, "error": outcome.error, "waiting": sorted(outcome.waiting)}
            for (name, use), outcome in islice(group.outcomes.items(), each)
        ],
        "ending": len(group.ending),
        "names": len(group.uses),
    }


def _operation(context: Context, operation: Operation, now: float) -> OperationInfo:
    waits_for, nodes = _waits_for(context, operation, now)
    started = operation.missing < len(operation.submits)
    return {
        "name": operation.name,
        "use": operation.use,
        "state": operation.state.value,
        "calls": operation.calls(),
        "waits_for": waits_for,
        "nodes": nodes,
        "age": now - operation.opened if started else 0.0,
        "deadline_in": operation.deadline - now if operation.deadline != math.inf else None,
        "arrivals": {
            submit.rank: at - operation.opened
            for submit, at in zip(operation.submits, operation.times, strict=True)
            if submit is not None
        },
        "missing": list(operation.missing_ranks()),
    }


def _waits_for(context: Context, operation: Operation, now: float) -> tuple[str, list[str]]:
    """Say what the operation waits for, and of which nodes where it is others that are waited for."""
    members, mine = operation.group.members, operation.group.mine
    if operation.group.frozen:
        return "change", []
    if operation.disputed != math.inf:
        return "calls", []
    verdict = operation.verdict
    if operation.state is State.BROKEN or (verdict is not None and verdict.words and not verdict.kept):
        heard = operation.group.departed.union(verdict.words if verdict is not None else ())
        return "verdict", [member.node for at, member in enumerate(members) if at != mine and at not in heard]
    missing = set(operation.missing_ranks())
    if missing:
        return "ranks", [member.node for member in members if missing.intersection(member.ranks)]
    if operation.state in (State.QUEUED, State.MAPPING):
        return "memory", []
    if operation.state in (State.WITHDRAWING, State.RELEASING):
        views = zip(members, operation.peers, strict=True)
        return "withdrawal", [member.node for member, view in views if view.waiting]
    if operation.state is State.FETCHING and operation.fetched is not None:
        return "result", [operation.fetched.node]
    if operation.state in (State.RESTARTING, State.FETCHING):
        return "rest", []
    if operation.unready:
        views = zip(members, operation.peers, strict=True)
        return "peer_memory", [
            member.node for index, (member, view) in enumerate(views) if index != mine and view.ready is None
        ]
    if operation.done:
        return "quorum", _silent(context, operation.group, now)
    if operation.outstanding:
        return "kernels", []
    if operation.execution is not None:
        due = [members[peer].node for peer in operation.execution.unserved()]
        return ("data" if due else ""), due
    return "", []


def _silent(context: Context, group: Group, now: float) -> list[str]:
    """Return the members that may live and were not heard within the failure timeout."""
    since = now - context.limits.failure_timeout
    return [
        node
        for node, member in group.others
        if member not in group.departed and context.heard.get(node, -math.inf) < since
    ]
