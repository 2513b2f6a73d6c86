"""Random clusters and what their ranks call, all from one seed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
from tests.simulation.cluster import Call, Cluster, Request, fingerprint
from tests.simulation.kernels import numpy_dtype, same_bits
from tests.simulation.oracle import canonical_order, expected

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction, reductions_of
from allreduced.daemon.engine.limits import Limits
from allreduced.protocol.peer import Fingerprint
from allreduced.schedules.schedule import Schedule
from allreduced.schedules.select import ALGORITHMS, schedule_for

COUNTS = (0, 1, 2, 7, 16, 31, 64, 97, 127, 255, 509, 1021, 2039)
MOST_BYTES = 16 << 10
"""Bytes of a tensor at most: it must fit into the tightest of the random limits."""
BATCH = 20
"""Seeds per test item: the checks around each item cost more than a run."""
Scheduler = Callable[[str, int, int], Schedule]


@dataclass(frozen=True, slots=True)
class Planned:
    """One operation of a group: what all ranks call, with each rank's data."""

    group: int
    name: str
    use: int
    fingerprint: Fingerprint
    inputs: Mapping[int, npt.NDArray[np.generic]]
    priority: int


def over_seeds(count: int) -> Callable[[Callable[[int], None]], Callable[[range], None]]:
    """Run a test for the seeds 0 … count-1, many per test item; the error of a failing one says how to repeat it.

    ``SIMULATION_SEEDS=first:end`` in the environment chooses other seeds.
    """
    first, end = map(int, os.environ.get("SIMULATION_SEEDS", f"0:{count}").split(":"))
    batches = [range(start, min(end, start + BATCH)) for start in range(first, end, BATCH)]

    def decorate(test: Callable[[int], None]) -> Callable[[range], None]:
        def run(batch: range) -> None:
            for seed in batch:
                try:
                    test(seed)
                except BaseException as error:
                    where = f"tests/simulation/{test.__module__.rsplit('.', 1)[-1]}.py"
                    command = f"SIMULATION_SEEDS={seed}:{seed + 1} python -m pytest {where} -k {test.__name__}"
                    error.add_note(f"replay: {command}")
                    raise

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        marked = pytest.mark.parametrize("batch", batches, ids=lambda batch: f"{batch.start}-{batch.stop - 1}")
        return marked(run)

    return decorate


def random_layouts(rng: random.Random) -> list[dict[str, list[int]]]:
    """Return one to three groups over one to four nodes; nodes hold different numbers of ranks, in any order."""
    names = [f"node{index}" for index in range(rng.choice((1, 2, 2, 3, 3, 4)))]
    layouts = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        chosen = rng.sample(names, rng.randint(1, len(names)))
        sizes = [rng.choice((1, 1, 2, 3)) for _ in chosen]
        ranks = list(range(sum(sizes)))
        rng.shuffle(ranks)
        layout = {}
        for name, size in zip(chosen, sizes, strict=True):
            layout[name] = sorted(ranks[:size])
            del ranks[:size]
        layouts.append(layout)
    return layouts


def random_limits(rng: random.Random) -> Limits:
    """Return limits that are roomy, or so small that operations wait for each other."""
    tight = rng.random() < 0.7
    return Limits(
        inline_bytes=rng.choice((0, 64, 1024)),
        arena_bytes=rng.choice((24, 28, 36, 60)) * 1024 if tight else 4 << 20,
        scratch_bytes=rng.choice((4, 8, 12)) * 1024 if tight else 2 << 20,
        arena_chunk=rng.choice((4096, 16384)),
        window_tiles=rng.choice((1, 2, 3, 4)),
    )


def random_data(rng: random.Random, dtype: DType, count: int) -> npt.NDArray[np.generic]:
    """Return elements whose sum depends on the order, where the type can show it."""
    generator = np.random.default_rng(rng.getrandbits(32))
    if dtype.is_integer:
        return np.frombuffer(generator.bytes(count * dtype.itemsize), numpy_dtype(dtype))
    if dtype is DType.BOOL:
        return generator.random(count) < 0.5
    parts = 2 * count if dtype.is_complex else count
    values = generator.standard_normal(parts) * 10.0 ** generator.integers(-3, 4, parts)
    if dtype.is_complex:
        return values.view(np.complex128).astype(numpy_dtype(dtype))
    return values.astype(numpy_dtype(dtype))


def plan(cluster: Cluster, rng: random.Random, operations: int) -> list[Planned]:
    """Return random operations for every group of the cluster; some names are used several times."""
    planned = []
    uses: dict[tuple[int, str], int] = {}
    for _ in range(operations):
        group = rng.choice(list(cluster.groups))
        ranks = [rank for member in cluster.groups[group].members for rank in member.ranks]
        name = rng.choice(("", "a", "b", "c", "d"))
        kind = rng.choice(("all_reduce", "all_reduce", "all_reduce", "all_reduce_many", "broadcast", "barrier"))
        dtype = rng.choice(list(DType))
        op = rng.choice([Reduction.SUM, Reduction.MEAN, *Reduction])
        if op is Reduction.COPY or op not in reductions_of(dtype):
            op = Reduction.SUM
        count = 0 if kind == "barrier" else min(rng.choice(COUNTS), MOST_BYTES // dtype.itemsize)
        root = rng.choice(sorted(ranks)) if kind == "broadcast" else -1
        described = fingerprint(kind, dtype, op, count, root, rng.choice(("", *ALGORITHMS[kind])))
        givers = [root] if kind == "broadcast" else ranks
        inputs = {rank: random_data(rng, dtype, count) for rank in givers} if count else {}
        use = uses.get((group, name), 0)
        uses[group, name] = use + 1
        planned.append(Planned(group, name, use, described, inputs, rng.choice((0, 0, 0, 5, -2))))
    return planned


def submit_all(
    cluster: Cluster,
    rng: random.Random,
    planned: Sequence[Planned],
    *,
    span: float = 20e-3,
    deadline: float = 1e6,
    skip: frozenset[tuple[int, int]] = frozenset(),
) -> dict[int, list[Request]]:
    """Let every rank call all operations of its groups, each rank in an order of its own.

    Only the uses of one name keep their order. ``skip``: (index in ``planned``, rank) that never calls.
    Returns the requests by index in ``planned``.
    """
    requests: dict[int, list[Request]] = {index: [] for index in range(len(planned))}
    for group in cluster.groups:
        mine = [index for index, operation in enumerate(planned) if operation.group == group]
        for member in cluster.groups[group].members:
            for rank in member.ranks:
                times = sorted(3e-3 + rng.random() * span for _ in mine)
                order = list(mine)
                rng.shuffle(order)
                order = _uses_in_order(planned, order)
                for at, index in zip(times, order, strict=True):
                    operation = planned[index]
                    if (index, rank) in skip:
                        continue
                    call = Call(
                        operation.name,
                        operation.fingerprint,
                        operation.inputs.get(rank),
                        operation.priority,
                        deadline,
                    )
                    requests[index].append(cluster.submit(at, group, rank, call))
    return requests


def _uses_in_order(planned: Sequence[Planned], order: Sequence[int]) -> list[int]:
    """Return the order with the uses of each name put in their own order, at the places that the name has."""
    by_name: dict[str, list[int]] = {}
    for index in sorted(order):
        by_name.setdefault(planned[index].name, []).append(index)
    return [by_name[planned[index].name].pop(0) for index in order]


def check_results(
    cluster: Cluster,
    planned: Sequence[Planned],
    requests: Mapping[int, Sequence[Request]],
    *,
    may_fail: bool = False,
    scheduler: Callable[[str, int, int], Schedule] | None = None,
) -> int:
    """Compare every result with the oracle, bit by bit; returns how many results there were."""
    good = 0
    for index, operation in enumerate(planned):
        members = [member.ranks for member in cluster.groups[operation.group].members]
        size = sum(map(len, members))
        wanted = b""
        kind, root = operation.fingerprint.kind, operation.fingerprint.root
        if operation.inputs:
            root_member = next((at for at, ranks in enumerate(members) if root in ranks), -1)
            reduction, dtype = Reduction(operation.fingerprint.op), DType(operation.fingerprint.dtype)
            if kind == "broadcast":
                wanted = operation.inputs[root].tobytes()
            elif scheduler is None and operation.fingerprint.algorithm == "canonical":
                wanted = canonical_order(dtype, reduction, operation.inputs, members).tobytes()
            else:
                choose = scheduler or partial(_schedule, operation.fingerprint.algorithm)
                schedule = choose(kind, len(members), root_member)
                wanted = expected(schedule, dtype, reduction, size, operation.inputs, members).tobytes()
        for request in requests[index]:
            if not request.node.alive:
                continue
            answer = request.answers[0]
            if isinstance(answer, Exception):
                assert may_fail, (operation.name, operation.use, request.rank, answer)
                continue
            same = same_bits(operation.fingerprint.dtype, answer or b"", wanted)
            assert same, (index, operation.fingerprint, operation.use, request.rank)
            good += 1
    return good


def _schedule(algorithm: str, kind: str, members: int, root: int) -> Schedule:
    return schedule_for(kind, algorithm or "direct", members, root)
