"""What a node sends, and the memory that it needs beside the result, are what docs/algorithms.md says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import pytest
from tests.simulation.cluster import Call, Cluster, fingerprint
from tests.simulation.workload import random_data

from allreduced.core.dtypes import DType
from allreduced.core.identity import GroupKey, Member
from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.actions import CreateArena, Send
from allreduced.daemon.engine.engine import Engine
from allreduced.daemon.engine.events import ArenaReady, GroupStarted, Submitted
from allreduced.daemon.engine.limits import Limits
from allreduced.daemon.engine.region import Region
from allreduced.schedules.broadcast import chain_broadcast_traffic, direct_broadcast_traffic
from allreduced.schedules.direct import direct_traffic
from allreduced.schedules.ring import ring_traffic
from allreduced.schedules.schedule import Traffic, block_bounds

COUNT = 1021
ROOMY = Limits(inline_bytes=0, arena_bytes=4 << 20, scratch_bytes=1 << 20, arena_chunk=4096)
Formula = Callable[[int, Sequence[int]], Traffic]


def _sent(algorithm: str, members: int, dtype: DType, op: Reduction, kind: str = "all_reduce") -> list[int]:
    """Return the payload bytes that each member sends, with two ranks on the first node and one on the others."""
    layout = {"node0": [0, members], **{f"node{index}": [index] for index in range(1, members)}}
    cluster = Cluster(1, [layout], ROOMY)
    root = 1 if kind == "broadcast" else -1
    described = fingerprint(kind, dtype, op, COUNT, root, algorithm)
    for rank in range(members + 1):
        data = random_data(cluster.rng, dtype, COUNT) if root in (-1, rank) else None
        cluster.submit(5e-3, 1, rank, Call("x", described, data))
    cluster.run()
    assert all(request.error is None for request in cluster.requests)
    return [
        sum(action.region.nbytes for action in cluster.nodes[f"node{index}"].log if isinstance(action, Send))
        for index in range(members)
    ]


def _wanted(formula: Formula, members: int, blocks: int, partial_itemsize: int, itemsize: int) -> list[int]:
    sizes = [end - start for start, end in pairwise(block_bounds(COUNT, blocks))]
    return [formula(member, sizes).nbytes(partial_itemsize, itemsize) for member in range(members)]


@pytest.mark.parametrize("members", [2, 3, 4, 7])
@pytest.mark.parametrize(
    ("algorithm", "dtype", "op", "partial_itemsize"),
    [
        ("direct", DType.FLOAT32, Reduction.SUM, 4),
        ("direct", DType.BFLOAT16, Reduction.MEAN, 2),
        ("canonical", DType.FLOAT64, Reduction.SUM, 8),
        ("canonical", DType.FLOAT16, Reduction.SUM, 2),
        ("ring", DType.INT8, Reduction.SUM, 1),
        ("ring", DType.COMPLEX128, Reduction.MEAN, 16),
        ("ring", DType.BFLOAT16, Reduction.SUM, 4),
        ("ring", DType.FLOAT16, Reduction.MEAN, 4),
        ("ring", DType.FLOAT16, Reduction.MAX, 2),
    ],
)
def test_an_all_reduce_sends_the_bytes_of_its_formula(
    algorithm: str, dtype: DType, op: Reduction, partial_itemsize: int, members: int
) -> None:
    formula = ring_traffic if algorithm == "ring" else direct_traffic
    assert _sent(algorithm, members, dtype, op) == _wanted(formula, members, members, partial_itemsize, dtype.itemsize)


@pytest.mark.parametrize("members", [2, 3, 4, 7])
@pytest.mark.parametrize("algorithm", ["direct", "chain"])
def test_a_broadcast_sends_the_bytes_of_its_formula(algorithm: str, members: int) -> None:
    traffic = chain_broadcast_traffic if algorithm == "chain" else direct_broadcast_traffic

    def formula(member: int, sizes: Sequence[int]) -> Traffic:
        return traffic(member, members, 1, sizes)

    sent = _sent(algorithm, members, DType.BFLOAT16, Reduction.COPY, "broadcast")
    assert sent == _wanted(formula, members, 1, 2, 2)


def _scratch(algorithm: str, members: int, dtype: DType, count: int, limits: Limits) -> int:
    """Return the bytes that an operation reserves beside its result."""
    engine = Engine("node0", limits)
    everyone = tuple(Member(f"node{index}", 1, (index,)) for index in range(members))
    engine.handle(GroupStarted(1, GroupKey(1, "j", "w"), 1, 4096, everyone, 0, {0: 1}), 0.0)
    described = fingerprint("all_reduce", dtype, Reduction.SUM, count, -1, algorithm)
    source = Region(1, 0, count * dtype.itemsize)
    actions = engine.handle(Submitted(1, 1, 1, 0, "x", described, source, 1e6, 0), 0.0)
    for action in actions:
        if isinstance(action, CreateArena):
            engine.handle(ArenaReady(action.buffer), 0.0)
    return engine.snapshot()["memory"]["reserved_bytes"] - count * dtype.itemsize


@pytest.mark.parametrize("members", [2, 5, 64])
def test_windows_are_bounded_whatever_the_size(members: int) -> None:
    limits = Limits(inline_bytes=0, window_tiles=4)
    scratch = partial(_scratch, members=members, limits=limits)
    count = 1 << 24
    # direct: a window per peer. ring: one per block but that which starts here.
    assert scratch("direct", dtype=DType.FLOAT32, count=count) == (members - 1) * 4 * 4096
    assert scratch("direct", dtype=DType.BFLOAT16, count=count) == (members - 1) * 4 * 4096
    assert scratch("ring", dtype=DType.FLOAT32, count=count) == (members - 1) * 4 * 4096
    # Partial sums in float32 need a window of their own, but for the block that becomes final here.
    assert scratch("ring", dtype=DType.BFLOAT16, count=count) == 2 * (members - 1) * 4 * 4096


def test_windows_shrink_before_they_take_more_than_a_quarter_of_the_scratch() -> None:
    limits = Limits(inline_bytes=0, window_tiles=4, scratch_bytes=1 << 20)
    tiles = [_scratch("direct", members, DType.FLOAT32, 1 << 24, limits) // 4096 for members in (17, 18, 33, 64, 65)]
    assert tiles == [64, 51, 64, 63, 64]
