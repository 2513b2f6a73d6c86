"""Memory that the operations of one user may hold: they wait for each other, and others do not wait for them."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.cluster import Call, Cluster, Request, fingerprint
from tests.simulation.workload import random_data

from allreduced.core.dtypes import DType
from allreduced.core.errors import LimitExceeded
from allreduced.daemon.engine.limits import Limits
from allreduced.protocol.peer import Withdraw

COUNT = 4 << 10
BIG = fingerprint(count=COUNT)
"""16 KiB, and some windows."""

ONE_EACH = Limits(inline_bytes=0, arena_bytes=1 << 20, scratch_bytes=256 << 10, arena_chunk=4096, user_bytes=24 << 10)
"""Room for many operations, but one of each user only."""


def _submit(cluster: Cluster, group: int, names: str, *, size: int = 2, late: float = 0.0) -> list[Request]:
    """Let all ranks call operations of these names, the last rank in the opposite order."""
    return [
        cluster.submit(5e-3 + late + 1e-3 * place, group, rank, _call(cluster, name))
        for rank in range(size)
        for place, name in enumerate(reversed(names) if rank == size - 1 else names)
    ]


def _call(cluster: Cluster, name: str) -> Call:
    return Call(name, BIG, random_data(cluster.rng, DType.FLOAT32, COUNT), deadline=5.0)


def test_operations_of_one_user_wait_for_each_other_and_end_well_in_any_order() -> None:
    withdrawn = 0
    for seed in range(20):
        cluster = Cluster(seed, [{"a": [0], "b": [1]}], ONE_EACH, tile_bytes=1024)
        requests = _submit(cluster, 1, "uvwxyz")
        cluster.run()
        assert [request.error for request in requests] == [None] * 12
        withdrawn += sum(isinstance(frame, Withdraw) for _, _, frame in cluster.network.frames)
        cluster.close()
    assert withdrawn, "no two of them were ready in opposite order: the test shows nothing"


def test_a_user_that_holds_its_share_holds_nobody_up() -> None:
    cluster = Cluster(1, [{"a": [0], "b": [1]}, {"a": [0], "b": [1]}], ONE_EACH, tile_bytes=1024, uids=(100, 200))
    cluster.lease_time = 1.0  # every result of both users is held for long
    first = _submit(cluster, 1, "uvw")
    second = _submit(cluster, 2, "x", late=10e-3)
    cluster.run()
    assert [request.error for request in (*first, *second)] == [None] * 8
    order = [name for name, _ in cluster.finished]
    assert order.index("x") < sorted(order.index(name) for name in "uvw")[1]
    cluster.close()


def test_what_can_never_fit_is_refused_with_the_setting_and_its_value() -> None:
    cluster = Cluster(1, [{"a": [0], "b": [1]}], replace(ONE_EACH, user_bytes=8 << 10), tile_bytes=1024)
    requests = _submit(cluster, 1, "x")
    cluster.run()
    for request in requests:
        assert isinstance(request.error, LimitExceeded)
        assert request.error.limit == "limits.arena_bytes_per_user"
        assert "8192 bytes" in request.error.message
    cluster.close()
