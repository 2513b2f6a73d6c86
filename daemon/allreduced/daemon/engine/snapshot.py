"""What the engine tells about itself: plain data for ``allreduced status``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypedDict

from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.group import Group
from allreduced.daemon.engine.leases import Leases
from allreduced.daemon.engine.memory import Memory
from allreduced.daemon.engine.operation import Operation, State


class OperationInfo(TypedDict):
    """One operation in flight. Times in seconds; ``arrivals``: rank to seconds since the first one here."""

    name: str
    use: int
    kind: str
    nbytes: int
    state: str
    waits_for: str
    age: float
    deadline_in: float | None
    arrivals: dict[int, float]
    missing: list[int]


class GroupInfo(TypedDict):
    """One group on this node. ``names``: whose uses are counted; ``late``: outcomes kept for ranks that come late."""

    job: str
    name: str
    generation: int
    size: int
    ranks: list[int]
    nodes: list[str]
    error: str
    operations: list[OperationInfo]
    ending: int
    names: int
    late: int


class Snapshot(TypedDict):
    """The whole engine."""

    node: str
    groups: dict[int, GroupInfo]
    memory: dict[str, int]
    leases: dict[int, dict[str, int]]
    outstanding: dict[str, int]
    counters: dict[str, int]


def take_snapshot(
    context: Context, groups: Mapping[int, Group], memory: Memory, leases: Leases, early: int
) -> Snapshot:
    """Return the state of the engine as plain data; changes nothing."""
    return {
        "node": context.node,
        "groups": {number: _group(context, group) for number, group in groups.items()},
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


def _group(context: Context, group: Group) -> GroupInfo:
    return {
        "job": group.key.job,
        "name": group.key.name,
        "generation": group.generation,
        "size": group.size,
        "ranks": list(group.ranks),
        "nodes": [member.node for member in group.members],
        "error": str(group.error) if group.error is not None else "",
        "operations": [_operation(context, operation) for operation in group.operations.values()],
        "ending": len(group.ending),
        "names": len(group.uses),
        "late": len(group.outcomes),
    }


def _operation(context: Context, operation: Operation) -> OperationInfo:
    fingerprint = operation.fingerprint
    started = operation.missing < len(operation.submits)
    return {
        "name": operation.name,
        "use": operation.use,
        "kind": fingerprint.kind if fingerprint is not None else "",
        "nbytes": operation.execution.nbytes if operation.execution is not None else 0,
        "state": operation.state.value,
        "waits_for": _waits_for(operation),
        "age": context.now - operation.opened if started else 0.0,
        "deadline_in": operation.deadline - context.now if operation.deadline != math.inf else None,
        "arrivals": {
            submit.rank: at - operation.opened
            for submit, at in zip(operation.submits, operation.times, strict=True)
            if submit is not None
        },
        "missing": list(operation.missing_ranks()),
    }


def _waits_for(operation: Operation) -> str:
    """Say in a few words what the operation waits for."""
    members = operation.group.members
    missing = operation.missing_ranks()
    if missing:
        return f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    if operation.state in (State.QUEUED, State.MAPPING):
        return "memory on this node"
    if operation.unready:
        late = [
            member.node
            for index, member in enumerate(members)
            if index != operation.group.mine and operation.peers[index].ready is None
        ]
        return f"memory on node {', '.join(late)}"
    if operation.outstanding:
        return "kernels and sends"
    if operation.execution is not None:
        due = [members[peer].node for peer in operation.execution.unserved()]
        return f"data from node {', '.join(due)}" if due else ""
    return ""
