"""Random clusters, groups, tensors and orders: every rank gets the same right bits, and nothing is left."""

from __future__ import annotations

import random

import pytest
from tests.simulation.cluster import Cluster
from tests.simulation.example_schedules import doubling
from tests.simulation.workload import (
    check_results,
    over_seeds,
    plan,
    random_layouts,
    random_limits,
    submit_all,
)

from allreduced.daemon.engine import admission
from allreduced.daemon.engine.program import Program, compile_program
from allreduced.schedules.ring import ring
from allreduced.schedules.schedule import Schedule
from allreduced.schedules.select import schedule_for


def _run(seed: int, scheduler: object = None) -> None:
    rng = random.Random(seed)
    cluster = Cluster(seed, random_layouts(rng), random_limits(rng))
    planned = plan(cluster, rng, rng.choice((3, 8, 20)))
    requests = submit_all(cluster, rng, planned, span=rng.choice((1e-3, 2e-2)))
    cluster.run()
    check_results(cluster, planned, requests, scheduler=scheduler if callable(scheduler) else None)
    cluster.close()


@over_seeds(300)
def test_every_rank_gets_the_bits_of_the_oracle(seed: int) -> None:
    _run(seed)


@over_seeds(80)
def test_the_same_with_schedules_of_many_steps(seed: int) -> None:
    def other(kind: str, members: int, root: int) -> Schedule:
        if kind == "broadcast":
            return schedule_for(kind, "direct", members, root)
        return doubling(members) if members in (2, 4) else ring(members)

    def program(kind: str, algorithm: str, members: int, root: int, member: int) -> Program:
        del algorithm
        return compile_program(other(kind, members, root), member)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "program_for", program)
        _run(seed, other)


@over_seeds(10)
def test_the_same_events_give_the_same_actions(seed: int) -> None:
    def run() -> list[str]:
        rng = random.Random(seed)
        cluster = Cluster(seed, random_layouts(rng), random_limits(rng))
        submit_all(cluster, rng, plan(cluster, rng, 8), deadline=rng.choice((5e-3, 1e6)))
        cluster.run()
        return [repr(action) for node in cluster.nodes.values() for action in node.log]

    assert run() == run()
