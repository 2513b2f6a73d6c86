"""Reports of agents, as they go over the wire."""

from __future__ import annotations

from dataclasses import replace

from allreduced.core.identity import GroupKey, Member
from allreduced.protocol.status import (
    AgentReport,
    CallReport,
    ClaimReport,
    FailedReport,
    GatheringReport,
    GroupReport,
    HiddenReport,
    OperationReport,
    PeerReport,
    ProcessReport,
)

KEY = GroupKey(1000, "job-1", "world")
MEMBERS = (Member("a", 11, (0, 1)), Member("b", 12, (2, 3)))
INCARNATIONS = {member.node: member.incarnation for member in MEMBERS}
CALL = CallReport("all_reduce", 1, 1, "(3, 4)", 12, -1, "", (0, 1))

OPERATION = OperationReport(
    name="w",
    use=2,
    state="gathering",
    age=12.5,
    deadline=287.5,
    calls=(CALL,),
    arrivals=((0, 12.5), (1, 12.0)),
    missing=(2, 3),
    waits_for="ranks",
    nodes=("b",),
)
GROUP = GroupReport(
    group=7,
    key=KEY,
    state="running",
    generation=1,
    size=4,
    members=MEMBERS,
    ranks=(ProcessReport(0, 100, "running"), ProcessReport(1, 101, "stopped")),
    left=(),
    error="",
    reason="",
    operations=(OPERATION,),
    failed=(FailedReport("x", 0, "mismatch", "ranks differ", (1,)),),
    more=0,
)
GATHERING = GatheringReport(GroupKey(1000, "job-2", "world"), 2, (ClaimReport(0, "a", 102, 1.5),), ())
REPORT = AgentReport(
    node="a",
    incarnation=11,
    pid=42,
    uid=1000,
    uptime=100.0,
    clients=3,
    peers=(PeerReport("b", 12, "tcp://10.0.0.2:4123", 0.25, "tcp", ""),),
    groups=(GROUP,),
    gatherings=(GATHERING,),
    hidden=(HiddenReport(1001, 2),),
    left_out=0,
)


def agent(node: str, *groups: GroupReport, gatherings: tuple[GatheringReport, ...] = ()) -> AgentReport:
    """Return a report with these groups only."""
    return AgentReport(node, INCARNATIONS.get(node, 13), 40, 1000, 60.0, 2, (), groups, gatherings, (), 0)


def group_at(node: str, *operations: OperationReport, more: int = 0) -> GroupReport:
    """Return what a member says about the group of ranks 0 and 1 on a, 2 and 3 on b."""
    ranks = next(member.ranks for member in MEMBERS if member.node == node)
    return replace(
        GROUP,
        ranks=tuple(ProcessReport(rank, 100 + rank, "running") for rank in ranks),
        operations=operations,
        failed=(),
        more=more,
    )


def operation(*arrivals: tuple[int, float], missing: tuple[int, ...], waits_for: str = "ranks") -> OperationReport:
    """Return an operation to which ranks of the agent came so many seconds ago."""
    calls = (replace(CALL, ranks=tuple(rank for rank, _ in arrivals)),) if arrivals else ()
    age = max((ago for _, ago in arrivals), default=0.0)
    return replace(OPERATION, age=age, calls=calls, arrivals=arrivals, missing=missing, waits_for=waits_for)
