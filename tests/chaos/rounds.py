"""One fault after the other on a running job, each judged; afterwards the job is whole again and at work."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.chaos.cluster import Cluster, Work
from tests.chaos.faults import Expectation, Fault, Kind, expectation
from tests.chaos.namespaces import Namespaces
from tests.chaos.verdict import Verdict, judge
from tests.support.proxy import Proxied

PATIENCE = 60.0
"""Seconds beyond every bound that are waited for a process before it is held to hang."""

MOMENT = 0.3
"""A fault comes up to so many seconds after the job has begun to work."""


@dataclass(frozen=True)
class Round:
    """A fault and what came of it. ``report``: what went on, where there are complaints."""

    fault: Fault
    verdict: Verdict
    report: str


def play(cluster: Cluster, fault: Fault, work: Work, slack: float, rng: random.Random) -> Round:
    """Let the fault happen at a random moment of a running group, wait for the end, mend, and form anew if need be.

    ``slack``: seconds beyond a bound that are no complaint; see ``verdict.judge``.

    :raises Stuck: a process neither ends nor goes on, or nothing works after the fault.
    """
    cluster.listen(rng.uniform(0.0, MOMENT))
    expected = expectation(
        fault,
        cluster.places,
        failure_timeout=cluster.failure_timeout,
        deadline=work.deadline,
    )
    at = time.monotonic()
    _STRIKE[fault.kind](cluster, fault)
    healed = _survive(cluster, fault) if expected.survives else _give_up(cluster, fault, expected)
    verdict = judge(
        cluster.records,
        expected,
        at=at,
        healed=healed,
        local=cluster.ranks_of(fault.node) if fault.kind is Kind.KILL_AGENT else frozenset(),
        slack=slack,
    )
    report = ""
    if verdict.complaints:
        report = cluster.report("\n".join([f"{fault}, for {healed - at:.2f} s:", *verdict.complaints]))
    if cluster.over():
        cluster.mend()
        cluster.form(work)
    return Round(fault, verdict, report)


def _survive(cluster: Cluster, fault: Fault) -> float:
    """Heal when it is time; wait until all have made a whole step since; return when it was healed."""
    cluster.listen(fault.seconds)
    healed = _heal(cluster)
    cluster.wait(
        lambda: cluster.steps_since(healed) >= 1 or cluster.over(),
        cluster.failure_timeout + PATIENCE,
        f"all go on after {fault}",
    )
    if cluster.over():
        everyone = frozenset(range(len(cluster.places)))
        cluster.wait(
            lambda: cluster.over() == everyone, 2 * cluster.failure_timeout + PATIENCE, f"all end after {fault}"
        )
    return healed


def _give_up(cluster: Cluster, fault: Fault, expected: Expectation) -> float:
    """Wait until the spared have ended, heal, wait until the others have; return when it was healed."""
    local = cluster.ranks_of(fault.node) if fault.kind is Kind.KILL_AGENT else frozenset()
    first = expected.spared | local
    if fault.seconds:
        cluster.listen(fault.seconds)
        _heal(cluster)
    cluster.wait(lambda: cluster.over() >= first, expected.bound + PATIENCE, f"ranks {sorted(first)} end after {fault}")
    healed = _heal(cluster)
    last = first | expected.cut_off
    cluster.wait(
        lambda: cluster.over() >= last, expected.late_bound + PATIENCE, f"ranks {sorted(last)} end after {fault}"
    )
    return healed


def _heal(cluster: Cluster) -> float:
    cluster.resume()
    if isinstance(cluster.network, Proxied | Namespaces):
        cluster.network.heal()
    return time.monotonic()


def _proxied(cluster: Cluster) -> Proxied:
    assert isinstance(cluster.network, Proxied)
    return cluster.network


def _namespaces(cluster: Cluster) -> Namespaces:
    assert isinstance(cluster.network, Namespaces)
    return cluster.network


def _hole(cluster: Cluster, fault: Fault) -> None:
    _proxied(cluster).black_hole(fault.node, fault.other)
    _proxied(cluster).black_hole(fault.other, fault.node)


def _isolate(cluster: Cluster, fault: Fault) -> None:
    for other in range(cluster.nodes):
        if other != fault.node:
            _hole(cluster, Fault(fault.kind, fault.node, other))


def _reset(cluster: Cluster, fault: Fault) -> None:
    _proxied(cluster).cut(fault.node, fault.other)
    _proxied(cluster).heal()


_STRIKE: Mapping[Kind, Callable[[Cluster, Fault], None]] = {
    Kind.KILL_RANK: lambda cluster, fault: cluster.kill_rank(fault.rank),
    Kind.KILL_AGENT: lambda cluster, fault: cluster.kill_agent(fault.node),
    Kind.PAUSE_RANK: lambda cluster, fault: cluster.stop_rank(fault.rank),
    Kind.PAUSE_AGENT: lambda cluster, fault: cluster.stop_agent(fault.node),
    Kind.STOP_RANK: lambda cluster, fault: cluster.stop_rank(fault.rank),
    Kind.STOP_AGENT: lambda cluster, fault: cluster.stop_agent(fault.node),
    Kind.RESET: _reset,
    Kind.CUT: lambda cluster, fault: _proxied(cluster).cut(fault.node, fault.other),
    Kind.HALF_OPEN: lambda cluster, fault: _proxied(cluster).half_open(fault.node, fault.other),
    Kind.HOLE: _hole,
    Kind.HOLE_ONE_WAY: lambda cluster, fault: _proxied(cluster).black_hole(fault.node, fault.other),
    Kind.DEAF: lambda cluster, fault: _proxied(cluster).black_hole(fault.node, fault.other),
    Kind.ISOLATE: _isolate,
    Kind.PULL_CABLE: lambda cluster, fault: _namespaces(cluster).pull_cable(fault.node),
    Kind.DOWN: lambda cluster, fault: _namespaces(cluster).down(fault.node),
    Kind.PULL_CABLE_LONG: lambda cluster, fault: _namespaces(cluster).pull_cable(fault.node),
    Kind.DOWN_LONG: lambda cluster, fault: _namespaces(cluster).down(fault.node),
}
