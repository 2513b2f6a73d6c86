"""Names that are not used any more are forgotten, on all members between the same two uses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tests.simulation.cluster import Cluster
from tests.simulation.workload import Planned, check_results, over_seeds, plan, random_layouts, submit_all

from allreduced.core.errors import ClosedError
from allreduced.core.identity import Member
from allreduced.daemon.engine.events import GroupBroken, RanksLeft
from allreduced.daemon.engine.limits import Limits
from allreduced.protocol.peer import Forget


def _cluster(seed: int, rng: random.Random, pool: int) -> tuple[Cluster, list[Planned]]:
    """Return a cluster that keeps few names, and operations whose names come again after a while."""
    limits = Limits(names_kept=rng.choice((0, 1, 3)), arena_bytes=4 << 20, scratch_bytes=2 << 20, arena_chunk=4096)
    cluster = Cluster(seed, random_layouts(rng), limits)
    planned, uses = [], dict[tuple[int, str], int]()
    for one in plan(cluster, rng, 40):
        name = f"name{rng.randrange(pool)}"
        use = uses.get((one.group, name), 0)
        uses[one.group, name] = use + 1
        planned.append(replace(one, name=name, use=use))
    return cluster, planned


@over_seeds(20)
def test_forgotten_names_are_used_again_by_all_alike(seed: int) -> None:
    rng = random.Random(seed)
    cluster, planned = _cluster(seed, rng, rng.choice((3, 12, 40)))
    requests = submit_all(cluster, rng, planned, span=rng.choice((2e-2, 0.3)))
    cluster.run()
    check_results(cluster, planned, requests)
    for node in cluster.nodes.values():
        counts = [group["names"] for group in node.engine.snapshot()["groups"].values()]
        assert all(count <= 40 for count in counts)
    cluster.close()


@over_seeds(20)
def test_what_waits_for_a_round_ends_with_the_group(seed: int) -> None:
    rng = random.Random(seed)
    cluster, planned = _cluster(seed, rng, 12)
    requests = submit_all(cluster, rng, planned, span=2e-2, deadline=1.0)
    at = 3e-3 + rng.random() * 2e-2
    for number in cluster.groups:
        members = cluster.groups[number].members
        if rng.random() < 0.5:
            broken = GroupBroken(number, ClosedError("over"))
            for member in members:
                cluster.agenda.at(at + rng.random() * 1e-3, partial(cluster.nodes[member.node].tell, broken))
        else:
            cluster.agenda.at(at, partial(_leave, cluster, number, members))
    cluster.run()
    check_results(cluster, planned, requests, may_fail=True)
    cluster.close()


def _leave(cluster: Cluster, number: int, members: Sequence[Member]) -> None:
    """Let rank 0 leave; the news goes over the same ordered flow as the frames of operations."""
    event = RanksLeft(number, (0,))
    first, *others = [member.node for member in members]
    cluster.nodes[first].tell(event)
    for other in others:
        cluster.network.message(first, other, lambda node: node.tell(event))


def test_names_are_forgotten_at_all() -> None:
    rng = random.Random(5)
    cluster = Cluster(5, [{"a": [0, 1], "b": [2], "c": [3]}], Limits(names_kept=10))
    planned = [replace(one, name=f"unique{index}", use=0) for index, one in enumerate(plan(cluster, rng, 200))]
    requests = submit_all(cluster, rng, planned, span=1.0)
    cluster.run()
    check_results(cluster, planned, requests)
    assert sum(isinstance(frame, Forget) for _, _, frame in cluster.network.frames) > 2
    for node in cluster.nodes.values():
        snapshot = node.engine.snapshot()
        assert snapshot["groups"][1]["names"] + snapshot["counters"]["names_forgotten"] == 200
        assert snapshot["groups"][1]["names"] < 80
    cluster.close()
