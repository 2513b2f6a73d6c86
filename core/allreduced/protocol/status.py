"""What agents tell about themselves: records inside the status messages of both protocols.

Each agent tells what it knows of its own clients exactly, and what it knows of others where that explains what it
waits for; ``cli.cluster_merge`` puts the reports of all agents together. Times are durations up to the moment of the
report, so no two clocks must agree. Reports are bounded: :func:`fit` leaves out what would not fit into a message.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias

from allreduced.core.identity import GroupKey, Members
from allreduced.core.limits import (
    MAX_RANKS,
    MAX_SECONDS,
    U8,
    U32,
    AtMost,
    Count,
    Duration,
    Id,
    Name,
    Rank,
    RankOrNone,
    Ranks,
    ShapeText,
    Size,
    Text,
    Word,
)
from allreduced.protocol.codec import ADDED_LATER, Codec

MAX_REPORT = 768 << 10
"""Bytes of one report at most, so that it fits one control frame."""

MAX_OPERATIONS = 256
"""Operations of one group that are told at most, those that began first."""

MAX_CALLS = 16
"""Different calls of one operation that are told at most."""

MAX_LISTED = 1 << 13
"""Agents, groups and gatherings of one report at most."""

Arrivals: TypeAlias = Annotated[tuple[tuple[Rank, Duration], ...], AtMost(MAX_RANKS)]
Nodes: TypeAlias = Annotated[tuple[Name, ...], AtMost(MAX_RANKS)]


@dataclass(frozen=True, slots=True)
class CallReport:
    """What ``ranks`` of the agent called; the fields are those of ``local.Submit``."""

    kind: Word
    dtype: U8
    op: U8
    shape: ShapeText
    count: Count
    root: RankOrNone
    algorithm: Word
    ranks: Ranks


Calls: TypeAlias = Annotated[tuple[CallReport, ...], AtMost(MAX_CALLS)]


@dataclass(frozen=True, slots=True)
class OperationReport:
    """One operation in flight, as its agent sees it.

    ``state``: a word for how far it is. ``age``: since the first rank of this agent called it, 0 where none did.
    ``deadline``: seconds that are left of it. ``calls``: more than one where ranks of this agent differ.
    ``arrivals``: (rank, how long ago) of this agent's ranks. ``missing``: ranks of the whole group that are not known
    here to have called it. ``waits_for``: ``ranks``, ``memory`` (of this node), ``peer_memory``, ``kernels``, ``data``,
    ``withdrawal``, ``calls`` (they differ; it will fail), ``names``, ``verdict``, ``change``, ``rest``, ``result``,
    ``quorum`` (docs/protocol.md explains them), or empty; of the agents ``nodes``, where others are meant.
    """

    name: Name
    use: Id
    state: Word
    age: Duration
    deadline: Duration
    calls: Calls
    arrivals: Arrivals
    missing: Ranks
    waits_for: Word
    nodes: Nodes


@dataclass(frozen=True, slots=True)
class FailedReport:
    """An operation that failed, for which ranks of this agent (``waiting``) will get this error when they call it."""

    name: Name
    use: Id
    error: Word
    reason: Text
    waiting: Ranks


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """A process of this agent's node that holds a rank.

    ``state``: ``running``, ``stopped`` (SIGSTOP), ``traced`` (by a debugger), ``blocked`` (in the kernel), ``dead``, or
    ``unknown`` where the agent cannot see it.
    """

    rank: Rank
    pid: U32
    state: Word


Processes: TypeAlias = Annotated[tuple[ProcessReport, ...], AtMost(MAX_RANKS)]
Operations: TypeAlias = Annotated[tuple[OperationReport, ...], AtMost(MAX_OPERATIONS)]
Failed: TypeAlias = Annotated[tuple[FailedReport, ...], AtMost(MAX_OPERATIONS)]


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A formed group that has ranks on this node.

    ``state``: ``running``, ``changing`` (its members agree on the end of the generation) or ``broken``. ``members``:
    those that it was formed with. ``ranks``: the processes of this node. ``left``: ranks of the whole group that left
    on purpose. ``error`` and ``reason``: code and text of what broke it, else empty. ``more``: operations that are not
    told here, for there are too many.
    """

    group: Id
    key: GroupKey
    state: Word
    generation: U32
    size: Size
    members: Members
    ranks: Processes
    left: Ranks
    error: Word
    reason: Text
    operations: Operations
    failed: Failed
    more: Count


@dataclass(frozen=True, slots=True)
class ClaimReport:
    """A process that waits for its group. ``waits``: since this agent knows of it."""

    rank: Rank
    node: Name
    pid: U32
    waits: Duration


Claims: TypeAlias = Annotated[tuple[ClaimReport, ...], AtMost(MAX_RANKS)]


@dataclass(frozen=True, slots=True)
class GatheringReport:
    """A group that is not formed yet. ``claims``: who is known here to wait for it, on any node.

    ``silent``: where all ranks are there, the agents whose consent is missing.
    """

    key: GroupKey
    size: Size
    claims: Claims
    silent: Nodes


@dataclass(frozen=True, slots=True)
class PeerReport:
    """An agent that this one has a link to. ``silence``: since something was heard of it.

    ``transport``: what carries the data of the link, a scheme; ``way``: about it, for people: which device, or why not
    another transport.
    """

    node: Name
    incarnation: Id
    address: Text
    silence: Duration
    transport: Word = field(default="", metadata=ADDED_LATER)
    way: Text = field(default="", metadata=ADDED_LATER)


@dataclass(frozen=True, slots=True)
class ReachReport:
    """What came of dialling another agent at the address that it tells others.

    ``outcome``: ``reached``, ``refused`` (nobody listens there), ``silent`` (nothing came back: off, or a firewall),
    ``unknown`` (its name is not known), ``failed``; ``detail`` says more. ``seconds``: until it was reached.
    ``bandwidth``: bytes per second over the link to it, 0 where it was not measured.
    """

    node: Name
    address: Text
    outcome: Word
    detail: Text
    seconds: Duration
    bandwidth: Count


@dataclass(frozen=True, slots=True)
class HiddenReport:
    """Groups, formed or not, of a user whose details the asker may not see."""

    uid: U32
    groups: Count


@dataclass(frozen=True, slots=True)
class UnansweredReport:
    """An agent whose report is missing, and why."""

    node: Name
    reason: Text


Peers: TypeAlias = Annotated[tuple[PeerReport, ...], AtMost(MAX_LISTED)]
Reaches: TypeAlias = Annotated[tuple[ReachReport, ...], AtMost(MAX_LISTED)]
Groups: TypeAlias = Annotated[tuple[GroupReport, ...], AtMost(MAX_LISTED)]
Gatherings: TypeAlias = Annotated[tuple[GatheringReport, ...], AtMost(MAX_LISTED)]
Hidden: TypeAlias = Annotated[tuple[HiddenReport, ...], AtMost(MAX_LISTED)]
Unanswered: TypeAlias = Annotated[tuple[UnansweredReport, ...], AtMost(MAX_LISTED)]


@dataclass(frozen=True, slots=True)
class AgentReport:
    """One agent. ``uptime``: since its start. ``left_out``: groups and gatherings that did not fit.

    ``release``: of allreduced. ``advertised``: the address that it tells others, empty where it tells none. ``reach``:
    whom it can dial, where that was asked for.
    """

    node: Name
    incarnation: Id
    pid: U32
    uid: U32
    uptime: Duration
    clients: U32
    peers: Peers
    groups: Groups
    gatherings: Gatherings
    hidden: Hidden
    left_out: Count
    release: Word = field(default="", metadata=ADDED_LATER)
    advertised: Text = field(default="", metadata=ADDED_LATER)
    reach: Reaches = field(default=(), metadata=ADDED_LATER)


_CODEC = Codec(AgentReport, code=None)


def fit(report: AgentReport, most: int = MAX_REPORT) -> AgentReport:
    """Return as much of the report as ``most`` bytes can tell: fewer operations first, then fewer groups.

    What is left out is counted in ``more`` and ``left_out``.
    """
    report = replace(
        report,
        peers=report.peers[:MAX_LISTED],
        hidden=report.hidden[:MAX_LISTED],
        reach=report.reach[:MAX_LISTED],
        groups=report.groups[:MAX_LISTED],
        gatherings=report.gatherings[:MAX_LISTED],
        left_out=report.left_out
        + max(len(report.groups) - MAX_LISTED, 0)
        + max(len(report.gatherings) - MAX_LISTED, 0),
    )
    operations = MAX_OPERATIONS
    while len(_CODEC.pack(report)) > most:
        if operations:
            operations //= 2
            report = replace(report, groups=tuple(_shorter(group, operations) for group in report.groups))
        elif report.groups or report.gatherings:
            groups, gatherings = len(report.groups) // 2, len(report.gatherings) // 2
            dropped = len(report.groups) - groups + len(report.gatherings) - gatherings
            report = replace(
                report,
                groups=report.groups[:groups],
                gatherings=report.gatherings[:gatherings],
                left_out=report.left_out + dropped,
            )
        else:
            report = replace(
                report,
                peers=report.peers[: len(report.peers) // 2],
                reach=report.reach[: len(report.reach) // 2],
                hidden=(),
            )
    return report


def later(report: AgentReport, seconds: float) -> AgentReport:
    """Return the report with the times of its calls and of those that wait as they are ``seconds`` after it was made.

    So the reports of agents that answered one after the other tell of one moment, and who came first can be seen.
    """
    return replace(
        report,
        groups=tuple(
            replace(group, operations=tuple(_aged(one, seconds) for one in group.operations)) for group in report.groups
        ),
        gatherings=tuple(
            replace(one, claims=tuple(replace(claim, waits=_sum(claim.waits, seconds)) for claim in one.claims))
            for one in report.gatherings
        ),
    )


def _aged(operation: OperationReport, seconds: float) -> OperationReport:
    left = operation.deadline
    return replace(
        operation,
        age=_sum(operation.age, seconds) if operation.arrivals else operation.age,
        deadline=left if left >= MAX_SECONDS else max(left - seconds, 0.0),
        arrivals=tuple((rank, _sum(ago, seconds)) for rank, ago in operation.arrivals),
    )


def _sum(duration: float, seconds: float) -> float:
    return min(duration + seconds, MAX_SECONDS)


def _shorter(group: GroupReport, most: int) -> GroupReport:
    dropped = max(len(group.operations) - most, 0)
    return replace(group, operations=group.operations[:most], failed=group.failed[:most], more=group.more + dropped)
