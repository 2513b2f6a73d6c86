"""Makes a failing run smaller: fewer faults, operations, ranks and nodes, until nothing can go any more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from tests.simulation.whole.scenario import GroupPlan, OperationPlan, Scenario, Sizes

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction

T = TypeVar("T")

_SEEDS = 4
"""With so many seeds for the delays a smaller run is tried: one that is left out shifts all that come after it."""


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], runs: int = 600) -> Scenario:
    """Return a smaller run for which ``fails`` holds as well; ``runs``: how many are tried at most."""
    left = runs
    best = scenario
    progress = True
    while progress and left > 0:
        progress = False
        for smaller in _smaller(best):
            for seed in dict.fromkeys((best.seed, *range(scenario.seed, scenario.seed + _SEEDS))):
                left -= 1
                candidate = replace(smaller, seed=seed)
                if fails(candidate):
                    best, progress = candidate, True
                    break
                if left <= 0:
                    return best
            if progress:
                break
    return best


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield runs that are a bit simpler, those that leave out most first."""
    for name in scenario.processes:
        if len(scenario.processes) > 1:
            yield from _without_node(scenario, name)
    for at in range(len(scenario.groups)):
        if len(scenario.groups) > 1:
            name = scenario.groups[at].name
            operations = tuple(one for one in scenario.operations if one.group != name)
            yield replace(scenario, groups=_without(scenario.groups, at), operations=operations)
    for at in range(len(scenario.faults)):
        yield replace(scenario, faults=_without(scenario.faults, at))
    for at in range(len(scenario.operations)):
        yield replace(scenario, operations=_without(scenario.operations, at))
    for group in scenario.groups:
        for rank in range(len(group.ranks)):
            if len(group.ranks) > 1:
                yield _without_rank(scenario, group, rank)
    used = {place for group in scenario.groups for place in group.ranks}
    for name, count in scenario.processes.items():
        if count > 1 and (name, count - 1) not in used:
            yield replace(scenario, processes={**scenario.processes, name: count - 1})
    plain = {"reforms": 0, "echoes": False, "blind": (), "sizes": Sizes()}
    for field, value in plain.items():
        if getattr(scenario, field) != value:
            yield replace(scenario, **{field: value})  # type: ignore[arg-type]
    for at, fault in enumerate(scenario.faults):
        for field, value in (("delay", 0.0), ("seconds", 0.0)):
            if getattr(fault, field) != value:
                simple = dataclasses.replace(fault, **{field: value})  # type: ignore[arg-type]
                yield replace(scenario, faults=(*scenario.faults[:at], simple, *scenario.faults[at + 1 :]))
    for at, operation in enumerate(scenario.operations):
        for simpler in _simpler(operation):
            yield replace(scenario, operations=(*scenario.operations[:at], simpler, *scenario.operations[at + 1 :]))


def _simpler(operation: OperationPlan) -> Iterator[OperationPlan]:
    if operation.kind != "all_reduce":
        yield replace(operation, kind="all_reduce", root=-1, algorithm="")
    if operation.count > 16:
        yield replace(operation, count=16)
    for field, value in (
        *(("dtype", int(DType.INT32)), ("op", int(Reduction.SUM)), ("algorithm", ""), ("priority", 0), ("at", 0.0)),
        *(("odd", -1), ("absent", ())),
    ):
        if getattr(operation, field) != value:
            yield replace(operation, **{field: value})  # type: ignore[arg-type]


def _without_node(scenario: Scenario, name: str) -> Iterator[Scenario]:
    smaller = scenario
    for group in scenario.groups:
        for rank in reversed(range(len(group.ranks))):
            if group.ranks[rank][0] == name:
                now = next((one for one in smaller.groups if one.name == group.name), None)
                if now is None or len(now.ranks) == 1:
                    return
                smaller = _without_rank(smaller, now, rank)
    yield replace(
        smaller,
        processes={other: count for other, count in smaller.processes.items() if other != name},
        faults=tuple(
            replace(fault, side=tuple(one for one in fault.side if one != name))
            for fault in smaller.faults
            if name not in (fault.node, fault.other) and fault.side != (name,)
        ),
        blind=tuple(pair for pair in smaller.blind if name not in pair),
    )


def _without_rank(scenario: Scenario, group: GroupPlan, rank: int) -> Scenario:
    def moved(old: int) -> int:
        return old - 1 if old > rank else old

    operations = []
    for one in scenario.operations:
        if one.group == group.name:
            if one.root == rank:
                continue
            absent = tuple(moved(old) for old in one.absent if old != rank)
            odd = -1 if one.odd == rank else moved(one.odd)
            one = replace(one, root=moved(one.root), absent=absent, odd=odd)
        operations.append(one)
    smaller = replace(group, ranks=_without(group.ranks, rank))
    groups = tuple(smaller if one is group else one for one in scenario.groups)
    return replace(scenario, groups=groups, operations=tuple(operations))


def _without(values: tuple[T, ...], at: int) -> tuple[T, ...]:
    return values[:at] + values[at + 1 :]
