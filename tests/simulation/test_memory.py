"""Where the agent's other memory takes a part of the limit, operations wait and none is lost."""

from __future__ import annotations

import random
from functools import partial

from tests.simulation.cluster import Cluster
from tests.simulation.node import SimulatedNode
from tests.simulation.workload import check_results, over_seeds, plan, random_layouts, submit_all

from allreduced.daemon.engine.events import RoomMade
from allreduced.daemon.engine.limits import Limits

KIB = 1024


@over_seeds(20)
def test_operations_wait_for_memory_that_something_else_takes(seed: int) -> None:
    rng = random.Random(seed)
    limits = Limits(inline_bytes=64, arena_bytes=100 * KIB, scratch_bytes=24 * KIB, arena_chunk=16 * KIB)
    cluster = Cluster(seed, random_layouts(rng), limits)

    def change(node: SimulatedNode) -> None:
        other, node.other_bytes = node.other_bytes, rng.choice((0, 20, 36)) * KIB
        if node.other_bytes < other:
            node.tell(RoomMade())

    for node in cluster.nodes.values():
        node.other_bytes = 36 * KIB
        for _ in range(5):
            cluster.agenda.at(rng.random() * 30e-3, partial(change, node))
    planned = plan(cluster, rng, 40)
    requests = submit_all(cluster, rng, planned, span=1e-3)
    cluster.run()
    check_results(cluster, planned, requests)
    cluster.close()


@over_seeds(30)
def test_users_at_their_share_wait_and_none_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    limits = Limits(
        inline_bytes=rng.choice((0, 64)),
        arena_bytes=rng.choice((60, 1 << 12)) * KIB,
        scratch_bytes=24 * KIB,
        user_bytes=rng.choice((36, 40, 60)) * KIB,
        arena_chunk=4096,
    )
    cluster = Cluster(seed, random_layouts(rng), limits, uids=rng.choice([(1000,), (1000, 2000), (1, 2, 3)]))
    planned = plan(cluster, rng, 40)
    requests = submit_all(cluster, rng, planned, span=1e-3)
    cluster.run()
    check_results(cluster, planned, requests)
    cluster.close()
