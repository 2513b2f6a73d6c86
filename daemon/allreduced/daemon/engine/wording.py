"""What the engine tells users when an operation cannot end well."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from allreduced.core.dtypes import DType
from allreduced.core.errors import (
    AllReducedError,
    ClosedError,
    DeadlineExceeded,
    GroupChanged,
    InvalidArgument,
    LimitExceeded,
    MismatchError,
    PeerLost,
    ProtocolError,
    RankLost,
    from_wire,
    to_wire,
)
from allreduced.core.identity import OperationKey
from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.group import Group
from allreduced.daemon.engine.operation import Operation
from allreduced.protocol.peer import Fingerprint

FIELDS = ("kind", "dtype", "op", "shape", "count", "root", "algorithm")
_DTYPES = {int(dtype) for dtype in DType}
_REDUCTIONS = {int(reduction) for reduction in Reduction}
_FIELD_NAMES = {"op": "the reduction", "root": "the root", "algorithm": "the algorithm", "kind": "the collective"}


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 1, 2``, or for many ``ranks 0, 1, 2, … (40 ranks)``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 16:
        return f"ranks {', '.join(map(str, ranks[:16]))}, … ({len(ranks)} ranks)"
    return f"ranks {', '.join(map(str, ranks))}"


def field_text(fingerprint: Fingerprint, field: str) -> str:
    """Return the value of a fingerprint's field as users know it: labels, not codes."""
    value = getattr(fingerprint, field)
    if field == "dtype":
        return DType(value).label if value in _DTYPES else f"unknown type {value}"
    if field == "op":
        return Reduction(value).label if value in _REDUCTIONS else f"unknown reduction {value}"
    return str(value)


def mismatch(operation: Operation, fingerprints: Sequence[tuple[int, Fingerprint]]) -> MismatchError:
    """Return the error for ranks that called one operation differently; ``fingerprints`` are (rank, what it gave)."""
    calls = {fingerprint for _, fingerprint in fingerprints}
    field = next(field for field in FIELDS if len({getattr(fingerprint, field) for fingerprint in calls}) > 1)
    by_rank = {rank: field_text(fingerprint, field) for rank, fingerprint in sorted(fingerprints, key=itemgetter(0))}
    by_value: dict[str, list[int]] = {}
    for rank, value in by_rank.items():
        by_value.setdefault(value, []).append(rank)
    given = "; ".join(f"{value or 'none'} on {ranks_text(ranks)}" for value, ranks in by_value.items())
    return MismatchError(
        f"{operation.group.label}: {operation.label} was called differently: "
        f"{_FIELD_NAMES.get(field, f'the {field}')} is {given}",
        field=field,
        by_rank=by_rank,
        hint=f"{_same(field)} on all ranks, or give different operations different names",
    )


def _same(field: str) -> str:
    return "call the same collective" if field == "kind" else f"give {field} the same value"


def deadline(operation: Operation, waited: float, late_nodes: Sequence[str]) -> DeadlineExceeded:
    """Return the error for an operation that took too long; ``late_nodes`` matter only where all ranks arrived."""
    missing = operation.missing_ranks()
    group = operation.group
    start = f"{group.label}: {operation.label} did not end within {waited:.3g} s"
    if missing:
        where = [
            f"{ranks_text(ranks)} on node {member.node!r}"
            for member in group.members
            if (ranks := [rank for rank in member.ranks if rank in missing])
        ]
        return DeadlineExceeded(
            f"{start}: {' and '.join(where)} did not call it",
            missing=missing,
            hint="look at what these ranks do; if they are only slow, give the operation a longer deadline",
        )
    if late_nodes:
        names = ", ".join(repr(node) for node in late_nodes)
        return DeadlineExceeded(
            f"{start}: all ranks called it, but node{'s' if len(late_nodes) > 1 else ''} {names} did not deliver",
            hint="look at the load, the memory limit and the network of that node, or give a longer deadline",
        )
    return DeadlineExceeded(
        f"{start}: all ranks called it, but this node has not finished its own part",
        hint="look at the load of this node, or give the operation a longer deadline",
    )


def cut_off(operation: Operation, node: str, error: AllReducedError | None) -> AllReducedError:
    """Return the error of a member that leaves its group, because it cannot end an operation as the others do.

    ``error``: with which it wanted to fail it.
    """
    why = f" (it was to fail: {error.message})" if error is not None else ""
    return PeerLost(
        f"{operation.group.label}: node {node!r} left the group, for it did not learn in time how {operation.label} "
        f"ended on the others{why}",
        nodes=[node],
        ranks=operation.group.ranks,
        hint="look at the network between the nodes and at the load of this one, then form the group anew",
    )


def diverged(group: Group, operations: Sequence[tuple[str, int]]) -> GroupChanged:
    """Return the error of a member whose ranks got results that the others did not keep."""
    labels = [OperationKey(group.number, name, use).label() for name, use in operations]
    shown = ", ".join(labels[:8]) + (f", … ({len(labels)} operations)" if len(labels) > 8 else "")
    return GroupChanged(
        f"{group.label}: the other nodes went on without node {group.me.node!r}, and may not have kept what it got "
        f"from {shown}",
        ranks=group.ranks,
        nodes=[group.me.node],
        diverged=True,
        hint="do not use these results: go back to a state that all ranks share, and form the group anew",
    )


def waits_for_memory(operation: Operation, waited: float, node: str) -> DeadlineExceeded:
    """Return the error for an operation that got no memory on this node until its deadline."""
    return DeadlineExceeded(
        f"{operation.group.label}: {operation.label} did not end within {waited:.3g} s: "
        f"it waited for memory on node {node!r}",
        missing=operation.missing_ranks(),
        hint="release results that are kept as views, or raise limits.arena_bytes",
    )


def not_made(operation: Operation, node: str, error: AllReducedError) -> AllReducedError:
    """Return ``error`` as all ranks get it: a node could not make the memory that an operation needs."""
    code, message, hint, facts = to_wire(error)
    where = f"{operation.group.label}: {operation.label} failed on node {node!r}"
    return from_wire((code, f"{where}: {message}", hint, facts))


def rank_left(operation: Operation, ranks: Sequence[int]) -> RankLost:
    """Return the error for an operation that lacks ranks which left the group."""
    group = operation.group
    nodes = [member.node for member in group.members if any(rank in member.ranks for rank in ranks)]
    return RankLost(
        f"{group.label}: {ranks_text(ranks)} left the group without calling {operation.label}",
        ranks=ranks,
        nodes=nodes,
        hint="call the same collectives on all ranks before any of them closes its communicator",
    )


def node_left(operation: Operation, members: Sequence[int]) -> RankLost:
    """Return the error for an operation that needs more of nodes whose agents stopped in order."""
    group = operation.group
    ranks = sorted(rank for member in members for rank in group.members[member].ranks)
    nodes = [group.members[member].node for member in members]
    return RankLost(
        f"{group.label}: the agent of {', '.join(map(repr, nodes))} stopped before {operation.label} was complete",
        ranks=ranks,
        nodes=nodes,
        hint="stop an agent when its ranks have closed their communicators",
    )


def too_large(operation: Operation, nbytes: int, node: str, limit: str, most: int) -> LimitExceeded:
    """Return the error for an operation that can never fit; ``limit`` is the setting, ``most`` its value in bytes."""
    return LimitExceeded(
        f"{operation.group.label}: {operation.label} of {nbytes} bytes does not fit into the {most} bytes "
        f"that node {node!r} allows ({limit})",
        limit=limit,
        hint=f"raise {limit} on that node, or reduce the tensor in parts",
    )


def too_many(operation: Operation, limit: int) -> LimitExceeded:
    """Return the error for one operation in flight too many."""
    return LimitExceeded(
        f"{operation.group.label}: {operation.label} would be more than {limit} operations in flight"
        " (limits.operations)",
        limit="limits.operations",
        hint="wait for earlier operations before starting more, or raise limits.operations",
    )


def too_many_names(group: Group, name: str, limit: int) -> LimitExceeded:
    """Return the error for one name of operations too many."""
    return LimitExceeded(
        f"{group.label}: {name!r} is refused, node {group.me.node!r} has {limit} different names of operations in use"
        " (limits.names)",
        limit="limits.names",
        hint="use one name again and again for the same tensor, for uses are counted; or raise limits.names",
    )


def round_unanswered(group: Group, silent: Sequence[str]) -> DeadlineExceeded:
    """Return the error for a group whose members never agreed which names of operations may be forgotten."""
    return DeadlineExceeded(
        f"{group.label}: the agents of {', '.join(silent)} did not say in time which names of operations are not used "
        "any more, and a call waited for that until its deadline",
        hint="these agents are alive but do not answer: look at their logs, then form the group anew",
    )


def lease_quota(operation: Operation, held: int, limit: int, setting: str) -> LimitExceeded:
    """Return the error for a client that keeps too many results."""
    return LimitExceeded(
        f"{operation.group.label}: the result of {operation.label} was not kept: this process holds {held} "
        f"{'bytes' if setting.endswith('bytes') else 'results'} of results and may hold {limit}",
        limit=setting,
        hint=f"drop views of earlier results, or raise {setting}",
    )


def bad_frame(operation: Operation, node: str, fault: str) -> ProtocolError:
    """Return the error for a peer that breaks the protocol."""
    return ProtocolError(
        f"{operation.group.label}: {operation.label} was given up, node {node!r} {fault}",
        hint="run the same version of allreduced on all nodes; if it is, please report this",
    )


def refused(operation: Operation, rank: int, error: AllReducedError) -> AllReducedError:
    """Return ``error`` as all ranks get it: with the rank whose part the agent could not take."""
    code, message, hint, facts = to_wire(error)
    group = operation.group
    where = f"rank {rank} on node {group.me.node!r}"
    return from_wire((code, f"{group.label}: {operation.label} of {where} was refused: {message}", hint, facts))


def bad_source(operation: Operation, rank: int, given: int, wanted: int) -> InvalidArgument:
    """Return the error for an input that is not the size that its fingerprint says."""
    return InvalidArgument(
        f"{operation.group.label}: rank {rank} gave {given} bytes to {operation.label}, which needs {wanted}"
    )


def client_gone(operation: Operation) -> ClosedError:
    """Return the error for a result whose client does not exist any more."""
    return ClosedError(f"{operation.group.label}: nobody is there to take the result of {operation.label}")


def not_open(group: int) -> ClosedError:
    """Return the error for a submit to a group that is not there."""
    return ClosedError(f"group {group} is not open on this node", hint="connect again")


def not_yours(group: Group, rank: int) -> ClosedError:
    """Return the error for a submit of a rank that the client does not hold."""
    return ClosedError(f"{group.label}: this process does not hold rank {rank}", hint="connect again")
