"""The reports of several agents put together. Pure.

Each agent is believed about its own ranks first. What others know about them counts where it does not report.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from allreduced.cli.cluster_view import (
    AgentView,
    ArrivalView,
    CallView,
    ClaimView,
    ClusterView,
    FailedView,
    GatheringView,
    GroupView,
    HiddenView,
    LinkView,
    MemberView,
    OperationView,
    RankView,
    UnansweredView,
    WaitView,
)
from allreduced.core.dtypes import DType
from allreduced.core.identity import GroupKey
from allreduced.core.limits import MAX_SECONDS
from allreduced.core.reductions import Reduction
from allreduced.protocol.status import (
    AgentReport,
    CallReport,
    FailedReport,
    GatheringReport,
    GroupReport,
    OperationReport,
    UnansweredReport,
)

# A newer agent may tell of some that are not known here.
_DTYPES = {int(dtype): dtype for dtype in DType}
_REDUCTIONS = {int(op): op.label for op in Reduction}


def put_together(reports: Sequence[AgentReport], unanswered: Sequence[UnansweredReport]) -> ClusterView:
    """Return one view of what all agents reported; the first report is that of the agent that was asked."""
    nodes = {report.node for report in reports}
    groups: dict[int, list[tuple[str, GroupReport]]] = {}
    gatherings: dict[GroupKey, list[tuple[str, GatheringReport]]] = {}
    hidden: dict[int, int] = {}
    for report in reports:
        for group in report.groups:
            groups.setdefault(group.group, []).append((report.node, group))
        for gathering in report.gatherings:
            gatherings.setdefault(gathering.key, []).append((report.node, gathering))
        for one in report.hidden:
            hidden[one.uid] = max(hidden.get(one.uid, 0), one.groups)
    views = [_group(told, _without(told[0][1], reports)) for told in groups.values()]
    return ClusterView(
        asked=reports[0].node if reports else "",
        agents=tuple(
            AgentView(
                node=report.node,
                incarnation=report.incarnation,
                pid=report.pid,
                uid=report.uid,
                uptime=report.uptime,
                clients=report.clients,
                groups=len(report.groups),
                left_out=report.left_out,
            )
            for report in reports
        ),
        links=tuple(
            LinkView(report.node, peer.node, peer.transport, peer.way) for report in reports for peer in report.peers
        ),
        unanswered=tuple(UnansweredView(one.node, one.reason) for one in unanswered if one.node not in nodes),
        groups=tuple(sorted(views, key=lambda view: (view.uid, view.job, view.name, view.group))),
        gatherings=tuple(_gathering(key, told) for key, told in sorted(gatherings.items())),
        hidden=tuple(HiddenView(uid, count) for uid, count in sorted(hidden.items())),
    )


# Formed groups


def _without(group: GroupReport, reports: Sequence[AgentReport]) -> set[str]:
    """Return the nodes whose agents surely have no process in the group: started anew, or they would tell."""
    started = {member.node: member.incarnation for member in group.members}

    def lacks(report: AgentReport) -> bool:
        keys = [one.key for one in report.groups] + [one.key for one in report.gatherings]
        return group.key not in keys and not report.left_out

    return {report.node for report in reports if report.incarnation != started.get(report.node) or lacks(report)}


def _group(told: Sequence[tuple[str, GroupReport]], without: set[str]) -> GroupView:
    by_node = dict(told)
    # A node that has not heard of a change yet must not hide it.
    newest = max((group for _, group in told), key=lambda group: group.generation)
    broken = next((group for _, group in told if group.state == "broken"), None)
    state = next((group.state for _, group in told if group.state == "changing"), newest.state)
    operations: dict[tuple[str, int], list[tuple[str, OperationReport]]] = {}
    failed: dict[tuple[str, int], list[FailedReport]] = {}
    for node, group in told:
        for operation in group.operations:
            operations.setdefault((operation.name, operation.use), []).append((node, operation))
        for one in group.failed:
            failed.setdefault((one.name, one.use), []).append(one)
    node_of = {rank: member.node for member in newest.members for rank in member.ranks}
    # Where a report had to be cut, an operation that it lacks may still be there.
    sure = {node for node, group in told if not group.more}
    views = [_operation(one, node_of, sure) for one in operations.values()]
    return GroupView(
        group=newest.group,
        uid=newest.key.uid,
        job=newest.key.job,
        name=newest.key.name,
        state=broken.state if broken is not None else state,
        generation=newest.generation,
        size=newest.size,
        members=tuple(
            MemberView(member.node, member.ranks, mine.state, mine.error, mine.reason)
            if (mine := by_node.get(member.node)) is not None
            else MemberView(member.node, member.ranks, "gone" if member.node in without else "unknown", "", "")
            for member in newest.members
        ),
        ranks=tuple(_ranks(newest, by_node, by_node.keys() | without)),
        error=broken.error if broken is not None else "",
        reason=broken.reason if broken is not None else "",
        operations=tuple(sorted(views, key=lambda view: -view.age)),
        failed=tuple(
            FailedView(name, use, one[0].error, one[0].reason, _sorted(rank for each in one for rank in each.waiting))
            for (name, use), one in failed.items()
        ),
        more=max(group.more for _, group in told),
    )


def _ranks(newest: GroupReport, by_node: dict[str, GroupReport], reported: Set[str]) -> Iterable[RankView]:
    left = {rank for group in by_node.values() for rank in group.left}
    places = sorted((rank, member.node) for member in newest.members for rank in member.ranks)
    processes = {(node, process.rank): process for node, group in by_node.items() for process in group.ranks}
    for rank, node in places:
        process = processes.get((node, rank))
        if process is not None:
            yield RankView(rank, node, process.pid, newest.key.uid, process.state)
        elif rank in left:
            yield RankView(rank, node, 0, newest.key.uid, "left")
        else:
            yield RankView(rank, node, 0, newest.key.uid, "gone" if node in reported else "unknown")


def _operation(told: Sequence[tuple[str, OperationReport]], node_of: dict[int, str], sure: set[str]) -> OperationView:
    here = {node for node, _ in told}
    # An agent knows of ranks elsewhere that they called it (their node said so), or only that it has not heard so.
    absent = set(node_of).intersection(*(one.missing for _, one in told))
    reported = here | sure
    arrivals = sorted((-ago, rank) for _, one in told for rank, ago in one.arrivals)
    first = told[0][1]
    deadlines = [one.deadline for _, one in told if one.deadline < MAX_SECONDS]
    return OperationView(
        name=first.name,
        use=first.use,
        age=max(one.age for _, one in told),
        deadline=min(deadlines, default=None),
        calls=tuple(_calls([call for _, one in told for call in one.calls])),
        arrivals=tuple(ArrivalView(rank, -before) for before, rank in arrivals),
        missing=_sorted(rank for rank in absent if node_of[rank] in reported),
        unknown=_sorted(rank for rank in absent if node_of[rank] not in reported),
        waits=tuple(WaitView(node, one.state, one.waits_for, one.nodes) for node, one in told),
    )


def _calls(reports: Sequence[CallReport]) -> Iterable[CallView]:
    ranks: dict[CallReport, list[int]] = {}
    for call in reports:
        ranks.setdefault(replace(call, ranks=()), []).extend(call.ranks)
    for call, callers in sorted(ranks.items(), key=lambda item: min(item[1], default=-1)):
        dtype = _DTYPES.get(call.dtype)
        yield CallView(
            kind=call.kind,
            dtype=dtype.label if dtype is not None else str(call.dtype),
            op=_REDUCTIONS.get(call.op, str(call.op)),
            shape=call.shape,
            count=call.count,
            nbytes=call.count * dtype.itemsize if dtype is not None else 0,
            root=call.root,
            algorithm=call.algorithm,
            ranks=_sorted(callers),
        )


# Groups that gather


def _gathering(key: GroupKey, told: Sequence[tuple[str, GatheringReport]]) -> GatheringView:
    size = max(one.size for _, one in told)
    reported = {node for node, _ in told}
    claims: dict[tuple[int, str, int], float] = {}
    for node, one in told:
        for claim in one.claims:
            # What a node does not say about its own process any more is old news elsewhere.
            if claim.node == node or claim.node not in reported:
                place = (claim.rank, claim.node, claim.pid)
                claims[place] = max(claim.waits, claims.get(place, 0.0))
    there = {rank for rank, _, _ in claims}
    return GatheringView(
        uid=key.uid,
        job=key.job,
        name=key.name,
        size=size,
        claims=tuple(ClaimView(rank, node, pid, key.uid, waits) for (rank, node, pid), waits in sorted(claims.items())),
        missing=tuple(rank for rank in range(size) if rank not in there),
        silent=tuple(sorted({node for _, one in told for node in one.silent})),
    )


def _sorted(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ranks)))
