"""The engine at scale: many operations at once, names without end, tensors beyond 32 bits."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from tests.support.bare_cluster import GROUP, BareCluster

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.actions import Deliver
from allreduced.daemon.engine.limits import Limits
from allreduced.protocol.peer import Fingerprint

MIB = 1 << 20
GIB = 1 << 30


def summed(count: int, dtype: DType = DType.FLOAT32) -> Fingerprint:
    return Fingerprint("all_reduce", int(dtype), int(Reduction.SUM), f"({count},)", count, -1, "direct")


def call_all(cluster: BareCluster, names: list[str], count: int, rng: random.Random) -> None:
    """Let every rank call all names, each rank in an order of its own, and see that all end well."""
    requests = []
    for rank in cluster.ranks:
        rng.shuffle(names)
        requests += [cluster.submit(rank, name, summed(count), 4 * count) for name in names]
    cluster.run()
    assert all(isinstance(cluster.results[request], Deliver) for request in requests)


@contextmanager
def lines_counted() -> Iterator[list[int]]:
    """Count the lines of Python that are executed: work without a clock."""
    lines = [0]

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        lines[0] += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: line)
    try:
        yield lines
    finally:
        sys.settrace(before)


def work_per_operation(in_flight: int, nodes: int, limits: Limits, count: int) -> float:
    cluster, rng = BareCluster(nodes, 2, limits), random.Random(1)
    names = [f"t{index}" for index in range(in_flight)]
    call_all(cluster, names, count, rng)  # arenas are there from now on
    with lines_counted() as lines:
        call_all(cluster, names, count, rng)
    return lines[0] / in_flight


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("limits", "count"),
    [
        pytest.param(Limits(), 16, id="small"),
        pytest.param(Limits(arena_bytes=GIB, scratch_bytes=GIB // 2), 65_536, id="roomy"),
        pytest.param(Limits(arena_bytes=12 * MIB, scratch_bytes=6 * MIB), 65_536, id="memory for a few only"),
    ],
)
def test_an_operation_is_no_more_work_among_many(nodes: int, limits: Limits, count: int) -> None:
    few = work_per_operation(20, nodes, limits, count)
    many = work_per_operation(400, nodes, limits, count)
    assert many < 2.5 * few, (few, many)


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_tables_do_not_grow_with_operations_and_names(nodes: int) -> None:
    cluster = BareCluster(nodes, 2, Limits(names_kept=50))
    rng = random.Random(2)
    sizes = []
    for block in range(6):
        names = [f"unique{block}.{index}" for index in range(100)] + [f"again{index}" for index in range(20)]
        for start in range(0, 120, 20):
            call_all(cluster, names[start : start + 20], 10, rng)
        call_all(cluster, [f"again{index}" for index in range(20)], 10_000, rng)
        call_all(cluster, [""], 3, rng)
        snapshots = [node.engine.snapshot() for node in cluster.nodes.values()]
        assert all(snapshot["groups"][GROUP]["names"] <= 120 for snapshot in snapshots)
        assert all(snapshot["groups"][GROUP]["operations"] == [] for snapshot in snapshots)
        assert all(snapshot["groups"][GROUP]["ending"] == 0 for snapshot in snapshots)
        assert all(snapshot["memory"]["reserved_bytes"] == 0 for snapshot in snapshots)
        sizes.append([(snapshot["memory"], snapshot["outstanding"], snapshot["leases"]) for snapshot in snapshots])
    assert sizes[1:] == sizes[:-1]


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("dtype", [DType.UINT8, DType.FLOAT32])
def test_a_tensor_beyond_4_gib_is_covered_once_and_in_64_bits(nodes: int, dtype: DType) -> None:
    nbytes = 13 * GIB + 4
    count = nbytes // dtype.itemsize
    limits = Limits(arena_bytes=200 * GIB, scratch_bytes=100 * GIB)
    cluster = BareCluster(nodes, 1, limits, tile_bytes=GIB, keep=True)
    requests = [cluster.submit(rank, "large", summed(count, dtype), nbytes) for rank in cluster.ranks]
    cluster.run()
    for request in requests:
        result = cluster.results[request]
        assert isinstance(result, Deliver)
        assert result.region is not None
        assert result.region.nbytes == nbytes
    covered = []
    for node in cluster.nodes.values():
        (result_arena,) = [buffer for buffer, size in node.arenas.items() if size >= nbytes]
        mine = [job for job in node.reduced if job.reduction is Reduction.SUM and len(job.sources) == nodes]
        for job in mine:
            assert job.count * dtype.itemsize == job.target.nbytes
            assert job.target.buffer == result_arena
            covered.append((job.target.offset, job.target.offset + job.target.nbytes))
        assert max(action.region.nbytes for action in node.sent) <= 5 * GIB if nodes > 1 else not node.sent
    covered.sort()
    assert covered[0][0] == 0
    assert covered[-1][1] == nbytes
    assert all(one[1] == other[0] for one, other in itertools.pairwise(covered))
