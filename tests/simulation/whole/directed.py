"""Runs that need one mechanism each: by name, as long as the seeds for the delays may be chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tests.simulation.whole.scenario import Fault, GroupPlan, OperationPlan, Scenario

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction

_T = 1.0


def _cluster(nodes: int, *faults: Fault, operations: int = 0, count: int = 200, heal_at: float = 3.0) -> Scenario:
    """Return a run of so many nodes with a rank each; rank i is on node ``ni``."""
    names = [f"n{index}" for index in range(nodes)]
    calls = tuple(
        OperationPlan("g", "a", "all_reduce", DType.INT32, Reduction.SUM, count, -1, "", 0.0, 20 * _T)
        for _ in range(operations)
    )
    group = GroupPlan("g", tuple((name, 0) for name in names))
    return Scenario(0, _T, dict.fromkeys(names, 1), (group,), calls, tuple(faults), heal_at=heal_at)


def late_frames() -> Scenario:
    """Return a run where what one member sent before a change comes to another one after it."""
    return _cluster(
        3,
        Fault("oneway", frame="Ready", count=1, side=("n1",), other="n2", seconds=0.03),
        Fault("cut", frame="Ready", count=3, delay=2e-3, node="n0", other="n1"),
        operations=2,
        heal_at=0.2,
    )


def two_proposers() -> Scenario:
    """Return a run where two members that do not reach each other propose at the same time, to the same third ones."""
    apart = [Fault("part", at=0.03, side=("n2",), other=other, seconds=2.3 * _T) for other in ("n0", "n1")]
    cut = [Fault("cut", at=0.031, node="n2", other=other) for other in ("n0", "n1")]
    return _cluster(5, *apart, *cut, Fault("kill", at=0.05, node="n4"), heal_at=2.6 * _T)


def decided_alone() -> Scenario:
    """Return a run where the proposer learns that its change is accepted, and is cut off before it tells anybody."""
    return _cluster(
        5,
        Fault("kill", at=0.02, node="n4"),
        Fault("part", frame="Committed", count=1, side=("n0",), seconds=2.5 * _T),
        heal_at=2.6 * _T,
    )


def reset_while_data_flows() -> Scenario:
    """Return a run where a link is reset under operations, which start again, or were delivered by some."""
    return _cluster(
        3,
        Fault("cut", frame="MoreGrants", count=2, delay=3e-4, node="n0", other="n1"),
        operations=3,
        heal_at=0.2,
    )


def halves() -> Scenario:
    """Return a run where the cluster falls into two parts, which both see the other one die."""
    return _cluster(5, Fault("part", at=0.02, side=("n0", "n3"), seconds=2.0 * _T), heal_at=2.2 * _T)


def asleep() -> Scenario:
    """Return a run where an agent is stopped as its last data comes, and goes on long after it was given up."""
    return _cluster(
        3,
        Fault("pause", frame="Ready", count=6, delay=2e-3, node="n2", seconds=2.6 * _T),
        operations=1,
        heal_at=2.8 * _T,
    )


DIRECTED: Mapping[str, Callable[[], Scenario]] = {
    "fence": late_frames,
    "promises": two_proposers,
    "chosen value": decided_alone,
    "watermark": reset_while_data_flows,
    "quarantine": reset_while_data_flows,
    "quorum": halves,
    "freshness": asleep,
}
"""By mechanism: the run that needs it."""

SEEDS = 24
"""So many seeds for the delays are tried."""


def runs(mechanism: str) -> Iterator[Scenario]:
    """Yield the run with every seed."""
    scenario = DIRECTED[mechanism]()
    for seed in range(SEEDS):
        yield scenario.but(seed=seed)
