"""What all agents told, as one view: who is there, what goes on, who is waited for. ``cluster_merge`` makes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AgentView:
    """An agent that reported. ``groups``: of it that are shown."""

    node: str
    incarnation: int
    pid: int
    uid: int
    uptime: float
    clients: int
    groups: int
    left_out: int


@dataclass(frozen=True, slots=True)
class LinkView:
    """A link between two agents, as ``node`` sees it.

    ``transport``: what carries its data; empty where an agent of an earlier version did not say. ``way``: about it.
    """

    node: str
    peer: str
    transport: str
    way: str


@dataclass(frozen=True, slots=True)
class UnansweredView:
    """An agent that did not report, and why. ``node`` is empty where it is not known."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank. ``state``: of its process, as in ``protocol.status.ProcessReport``; or ``left``, or ``gone`` (lost).

    ``pid`` is 0 and ``state`` is ``unknown`` where its agent did not report.
    """

    rank: int
    node: str
    pid: int
    uid: int
    state: str


@dataclass(frozen=True, slots=True)
class MemberView:
    """A node of a group. ``state``: of the group on this node.

    ``gone``: no process of it is there any more. ``unknown``: its agent did not report.
    """

    node: str
    ranks: tuple[int, ...]
    state: str
    error: str
    reason: str


@dataclass(frozen=True, slots=True)
class CallView:
    """One way in which ranks called an operation. ``count`` in elements, ``root`` -1 where there is none."""

    kind: str
    dtype: str
    op: str
    shape: str
    count: int
    nbytes: int
    root: int
    algorithm: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArrivalView:
    """When a rank called the operation, in seconds before now."""

    rank: int
    ago: float


@dataclass(frozen=True, slots=True)
class WaitView:
    """What one node waits for, in a word of ``protocol.status.OperationReport``, and of which nodes."""

    node: str
    state: str
    waits_for: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OperationView:
    """An operation in flight. Times in seconds.

    ``age``: since the first rank called it. ``deadline``: what is left of it, None where there is none. ``arrivals``:
    in the order in which they came. ``missing``: ranks that have not called it. ``unknown``: ranks of agents that did
    not report, not known to have called it. ``calls``: more than one where the ranks differ.
    """

    name: str
    use: int
    age: float
    deadline: float | None
    calls: tuple[CallView, ...]
    arrivals: tuple[ArrivalView, ...]
    missing: tuple[int, ...]
    unknown: tuple[int, ...]
    waits: tuple[WaitView, ...]


@dataclass(frozen=True, slots=True)
class FailedView:
    """An operation that failed while ``waiting`` had not called it: they get this error when they do."""

    name: str
    use: int
    error: str
    reason: str
    waiting: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    """A formed group. ``more``: operations not told.

    ``state``: ``running``; ``changing`` or ``broken`` if it is on any node.
    """

    group: int
    uid: int
    job: str
    name: str
    state: str
    generation: int
    size: int
    members: tuple[MemberView, ...]
    ranks: tuple[RankView, ...]
    error: str
    reason: str
    operations: tuple[OperationView, ...]
    failed: tuple[FailedView, ...]
    more: int


@dataclass(frozen=True, slots=True)
class ClaimView:
    """A process that waits for its group, for ``waits`` seconds."""

    rank: int
    node: str
    pid: int
    uid: int
    waits: float


@dataclass(frozen=True, slots=True)
class GatheringView:
    """A group that is not formed yet. ``missing``: ranks that have not connected.

    ``silent``: where none is missing, agents that have not agreed to form the group.
    """

    uid: int
    job: str
    name: str
    size: int
    claims: tuple[ClaimView, ...]
    missing: tuple[int, ...]
    silent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HiddenView:
    """Groups of a user whose details are not for the asker: how many one agent has at most."""

    uid: int
    groups: int


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Everything. ``asked``: the node whose agent was asked."""

    asked: str
    agents: tuple[AgentView, ...]
    links: tuple[LinkView, ...]
    unanswered: tuple[UnansweredView, ...]
    groups: tuple[GroupView, ...]
    gatherings: tuple[GatheringView, ...]
    hidden: tuple[HiddenView, ...]
