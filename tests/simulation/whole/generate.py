"""A run from a seed: a cluster, what its ranks call, and what goes wrong."""

from __future__ import annotations

import random

from tests.simulation.whole.scenario import Fault, GroupPlan, OperationPlan, Scenario, Sizes

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction
from allreduced.schedules.select import ALGORITHMS

TIMEOUT = 1.0
"""The failure timeout of generated runs, in virtual seconds."""

_NODES = (*(2,) * 12, *(3,) * 14, *(4,) * 8, *(5,) * 4, 6, 6, 7, 8, 9)
_DTYPES = (DType.FLOAT32, DType.INT32, DType.FLOAT16)
_REDUCTIONS = (Reduction.SUM, Reduction.SUM, Reduction.MEAN, Reduction.MAX)
_COUNTS = (0, 1, 5, 16, 33, 64, 97, 130, 200)
_KINDS = ("all_reduce", "all_reduce", "all_reduce", "all_reduce_many", "broadcast", "barrier")
_STEPS = (
    *("Ready", "Ready", "Ready", "MoreGrants", "Arrived", "Form", "Announce", "Abort", "Kept", "Confirm"),
    *("Trouble", "Prepare", "Promise", "Accept", "Accepted", "Committed", "Fetch"),
    *("Prepare", "Promise", "Accept", "Accepted", "Committed"),
)


def generate(seed: int) -> Scenario:
    """Return the run that belongs to a seed."""
    rng = random.Random(f"scenario {seed}")
    names = [f"n{index}" for index in range(rng.choice(_NODES))]
    rng.shuffle(names)
    most = 4 if len(names) <= 3 else 2 if len(names) <= 5 else 1
    processes = {name: rng.choice((1, 1, 1, min(2, most), most)) for name in sorted(names)}
    groups = _groups(rng, names, processes)
    calm = rng.random()
    faults = () if calm < 0.03 else _resets(rng, names) if calm < 0.2 else _faults(rng, names, processes)
    longest = max((fault.at + fault.delay + fault.seconds for fault in faults), default=0.0)
    return Scenario(
        seed=seed,
        timeout=TIMEOUT,
        processes=processes,
        groups=groups,
        operations=_operations(rng, groups),
        faults=faults,
        sizes=_sizes(rng),
        blind=_blind(rng, sorted(names)),
        reforms=rng.choice((0, 0, 1, 2)),
        echoes=rng.random() < 0.5,
        heal_at=min(max(longest, 0.05), 3.5 * TIMEOUT) + 0.05,
    )


def _groups(rng: random.Random, names: list[str], processes: dict[str, int]) -> tuple[GroupPlan, ...]:
    groups = []
    for number in range(rng.choice((1, 1, 1, 2, 2, 3)) if len(names) <= 5 else 1):
        chosen = names if not number else rng.sample(names, rng.randint(1, len(names)))
        ranks = [(name, slot) for name in chosen for slot in range(rng.randint(1, processes[name]))]
        rng.shuffle(ranks)
        groups.append(GroupPlan(f"g{number}", tuple(ranks)))
    return tuple(groups)


def _operations(rng: random.Random, groups: tuple[GroupPlan, ...]) -> tuple[OperationPlan, ...]:
    operations = []
    busy = 0.0
    for number in range(rng.choice((1, 2, 2, 3, 3, 4, 5))):
        group = rng.choice(groups)
        size = len(group.ranks)
        kind = rng.choice(_KINDS)
        dtype = rng.choice(_DTYPES)
        op = rng.choice(_REDUCTIONS)
        if op is Reduction.MEAN and dtype.is_integer:
            op = Reduction.SUM
        busy += rng.choice((0.0, 0.0, 1e-3, 4e-3, 0.3)) * rng.random()
        special = rng.random()
        absent = tuple(sorted(rng.sample(range(size), rng.randint(1, size)))) if special < 0.08 else ()
        odd = rng.randrange(size) if 0.08 <= special < 0.12 and size > 1 and kind != "barrier" else -1
        alone = bool(absent) or odd >= 0
        deadline = 20 * TIMEOUT if rng.random() < 0.6 else rng.choice((1e-3, 3e-3, 6e-3, 2e-2, 0.5, 1.0)) * TIMEOUT
        if alone:
            deadline = min(deadline, rng.choice((5e-3, 0.3, 1.5)) * TIMEOUT)
        operations.append(
            OperationPlan(
                group=group.name,
                name=f"alone{number}" if alone else rng.choice(("", "a", "b")),
                kind=kind,
                dtype=int(dtype),
                op=int(op),
                count=0 if kind == "barrier" else rng.choice(_COUNTS),
                root=rng.randrange(size) if kind == "broadcast" else -1,
                algorithm=rng.choice(("", "", *ALGORITHMS[kind])),
                at=busy,
                deadline=deadline,
                priority=rng.choice((0, 0, 0, 3)),
                absent=absent,
                odd=odd,
            )
        )
    return tuple(operations)


def _sizes(rng: random.Random) -> Sizes:
    tight = rng.random() < 0.5
    return Sizes(
        tile=rng.choice((64, 128, 256)),
        inline=rng.choice((0, 64, 1024)),
        arena=rng.choice((16, 20, 32)) * 1024 if tight else 4 << 20,
        scratch=8 * 1024 if tight else 2 << 20,
        chunk=4096,
        window=rng.choice((1, 2, 4)),
    )


def _blind(rng: random.Random, names: list[str]) -> tuple[tuple[str, str], ...]:
    """Return pairs where only one of the two knows the address of the other."""
    pairs = [(one, other) for one in names for other in names if one < other]
    pairs = [pair for pair in pairs if rng.random() < 0.2]
    return tuple(pair if rng.random() < 0.5 else pair[::-1] for pair in pairs)


def _when(rng: random.Random) -> tuple[float, str, int, float]:
    """Return a time, or a step of the protocol with a delay."""
    if rng.random() < 0.4:
        return rng.random() * rng.choice((0.01, 0.02, 0.05, 0.5, 1.5)), "", 0, 0.0
    delay = rng.choice((0.0, 0.0, rng.random() * 1e-3, rng.random() * 5e-3))
    return 0.0, rng.choice(_STEPS), 1 + int(rng.random() ** 2 * 12), delay


def _resets(rng: random.Random, names: list[str]) -> tuple[Fault, ...]:
    """Return faults that must cost nobody anything."""
    faults = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, frame, count, delay = _when(rng)
        one, other = rng.sample(names, 2)
        kind, seconds = rng.random(), rng.random() * 0.2 * TIMEOUT
        if kind < 0.6:
            faults.append(Fault("cut", at, frame, count, delay, one, other))
        elif kind < 0.8:
            faults.append(Fault("pause", at, frame, count, delay, one, seconds=seconds))
        else:
            only = other if kind < 0.9 else ""
            way = rng.choice(("part", "oneway"))
            faults.append(Fault(way, at, frame, count, delay, other=only, side=(one,), seconds=seconds))
    return tuple(faults)


def _faults(rng: random.Random, names: list[str], processes: dict[str, int]) -> tuple[Fault, ...]:
    kinds = (
        *("crash", "crash", "crash", "power", "pause", "pause", "pause", "drain", "cut", "cut", "cut"),
        *("part", "part", "part", "oneway", "oneway", "slow", "kill", "kill", "hang", "leave", "memory"),
    )
    number = rng.randint(5, 9) if rng.random() < 0.08 else rng.choice((1, 1, 2, 2, 3, 4))
    return tuple(_fault(rng, rng.choice(kinds), names, processes) for _ in range(number))


def _fault(rng: random.Random, kind: str, names: list[str], processes: dict[str, int]) -> Fault:
    at, frame, count, delay = _when(rng)
    seconds = rng.choice((0.02, 0.3, 0.8, 1.1, 1.5, 2.5, 0.0)) * TIMEOUT * (0.7 + 0.6 * rng.random())
    one, other = rng.sample(names, 2)
    if frame and rng.random() < 0.6:
        one, other = rng.choice((("@sender", "@target"), ("@target", "@sender")))
    if kind in ("part", "oneway"):
        if one.startswith("@") or rng.random() < 0.2:
            only = other if rng.random() < 0.4 else ""
            return Fault(kind, at, frame, count, delay, other=only, side=(one,), seconds=seconds)
        side = tuple(sorted(rng.sample(names, rng.randint(1, len(names) - 1))))
        return Fault(kind, at, frame, count, delay, side=side, seconds=seconds)
    if kind == "cut":
        return Fault(kind, at, frame, count, delay, one, other)
    if kind in ("kill", "hang", "leave"):
        slot = rng.randrange(processes.get(one, 1))
        return Fault(kind, at, frame, count, delay, one, slot=slot, seconds=seconds)
    return Fault(kind, at, frame, count, delay, one, seconds=seconds)
