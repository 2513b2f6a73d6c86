"""Things go wrong at any moment: every call still ends once, and no memory, send or receive is left."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from tests.simulation.cluster import Cluster
from tests.simulation.workload import (
    Planned,
    check_results,
    over_seeds,
    plan,
    random_layouts,
    random_limits,
    submit_all,
)

from allreduced.core.errors import (
    AllReducedError,
    DeadlineExceeded,
    LimitExceeded,
    MismatchError,
    PeerLost,
    RankLost,
)
from allreduced.core.identity import OperationKey
from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.events import GroupBroken, RanksLeft


def _setup(seed: int) -> tuple[random.Random, Cluster, list[Planned]]:
    rng = random.Random(seed)
    cluster = Cluster(seed, random_layouts(rng), random_limits(rng))
    return rng, cluster, plan(cluster, rng, rng.choice((3, 8, 20)))


@over_seeds(60)
def test_a_missing_rank_is_named(seed: int) -> None:
    rng, cluster, planned = _setup(seed)
    victim = rng.randrange(len(planned))
    ranks = sorted(rank for member in cluster.groups[planned[victim].group].members for rank in member.ranks)
    absent = rng.sample(ranks, rng.randint(1, len(ranks)))
    if len(absent) == len(ranks):
        absent.pop()
    later = {
        index
        for index, operation in enumerate(planned)
        if (operation.group, operation.name) == (planned[victim].group, planned[victim].name)
        and operation.use >= planned[victim].use
    }
    skip = frozenset((index, rank) for index in later for rank in absent)
    requests = submit_all(cluster, rng, planned, skip=skip, deadline=10.0)
    cluster.run()
    for index in later if absent else ():
        for request in requests[index]:
            assert isinstance(request.error, DeadlineExceeded)
            assert request.error.missing == tuple(sorted(absent))
            label = OperationKey(planned[index].group, planned[index].name, planned[index].use).label()
            assert label in str(request.error)
    check_results(cluster, planned, requests, may_fail=True)
    cluster.close()


@over_seeds(60)
def test_a_mismatch_ends_the_operation_on_every_rank(seed: int) -> None:
    rng, cluster, planned = _setup(seed)
    victim = rng.randrange(len(planned))
    operation = planned[victim]
    requests = submit_all(cluster, rng, planned, deadline=10.0)
    if len(requests[victim]) == 1:
        return
    odd = rng.choice(requests[victim])
    known = operation.fingerprint
    other = "" if known.algorithm else "direct"
    field, text, changed = rng.choice(
        (
            ("shape", "(1, 1)", replace(known, shape="(1, 1)")),
            ("op", "prod", replace(known, op=int(Reduction.PROD))),
            ("algorithm", other, replace(known, algorithm=other)),
        )
    )
    if changed == known:
        return
    odd.call.fingerprint = changed
    cluster.run()
    for request in requests[victim]:
        error = request.error
        assert isinstance(error, MismatchError), error
        assert error.field == field
        assert error.by_rank[odd.rank] == text
        assert len(set(error.by_rank.values())) == 2
        assert sorted(error.by_rank) == sorted(found.rank for found in requests[victim])
    others = {index: [] if index == victim else found for index, found in requests.items()}
    check_results(cluster, planned, others)
    cluster.close()


@over_seeds(80)
def test_a_dead_node_breaks_its_groups_only(seed: int) -> None:
    rng, cluster, planned = _setup(seed)
    requests = submit_all(cluster, rng, planned, deadline=1000.0)
    dead = rng.choice(list(cluster.nodes.values()))
    error = PeerLost(f"node {dead.name!r} is gone", nodes=[dead.name])
    at = 2e-3 + rng.random() * 30e-3

    def die() -> None:
        dead.alive = False

    cluster.agenda.at(at, die)
    broken = set()
    for number, group in cluster.groups.items():
        names = [member.node for member in group.members]
        if dead.name in names:
            broken.add(number)
            for name in names:
                tell = partial(cluster.nodes[name].tell, GroupBroken(number, error))
                cluster.agenda.at(at + rng.random() * 5e-3, tell)
    cluster.run()
    for index, operation in enumerate(planned):
        for request in requests[index]:
            if request.node.alive and isinstance(request.answers[0], AllReducedError):
                assert operation.group in broken
                assert request.answers[0] is error
    check_results(cluster, planned, requests, may_fail=True)
    cluster.close()


@over_seeds(80)
def test_a_rank_that_leaves_is_missed_only_where_it_is_missing(seed: int) -> None:
    rng, cluster, planned = _setup(seed)
    number = rng.choice(list(cluster.groups))
    group = cluster.groups[number]
    member = rng.choice(group.members)
    leaver = rng.choice(member.ranks)
    contributes = {index for index in range(len(planned)) if rng.random() < 0.5}
    contributes -= {
        index
        for index in contributes
        if any(
            other not in contributes
            and (planned[other].group, planned[other].name) == (planned[index].group, planned[index].name)
            for other in range(index)
        )
    }
    skip = frozenset(
        (index, leaver)
        for index, operation in enumerate(planned)
        if operation.group == number and index not in contributes
    )
    requests = submit_all(cluster, rng, planned, skip=skip, deadline=1000.0)
    mine = cluster.node_of(number, leaver)
    event = RanksLeft(number, (leaver,))

    def leave() -> None:
        mine.tell(event)
        # The news goes over the same ordered flow as the frames of operations.
        for other in group.members:
            if other.node != mine.name:
                cluster.network.message(mine.name, other.node, lambda node: node.tell(event))

    cluster.agenda.at(25e-3, leave)
    cluster.run()
    for index, operation in enumerate(planned):
        for request in requests[index]:
            if (index, leaver) in skip:
                assert isinstance(request.error, RankLost), request.error
                assert request.error.ranks == (leaver,)
            else:
                assert request.error is None, (operation.name, request.error)
    check_results(cluster, planned, requests, may_fail=True)
    cluster.close()


@over_seeds(60)
def test_an_arena_that_cannot_be_made_fails_what_waits_for_it(seed: int) -> None:
    rng, cluster, planned = _setup(seed)
    for node in cluster.nodes.values():
        node.arena_failures = 0.3
    requests = submit_all(cluster, rng, planned, deadline=1000.0)
    cluster.run()
    for found in requests.values():
        kinds = {type(request.error) for request in found}
        assert kinds <= {type(None), LimitExceeded}
    check_results(cluster, planned, requests, may_fail=True)
    cluster.close()


@over_seeds(80)
def test_deadlines_at_any_moment(seed: int) -> None:
    rng, cluster, planned = _setup(seed)
    requests = submit_all(cluster, rng, planned, span=5e-3, deadline=rng.choice((1e-3, 4e-3, 8e-3)))
    cluster.run()
    for found in requests.values():
        assert all(request.error is None or isinstance(request.error, DeadlineExceeded) for request in found)
    check_results(cluster, planned, requests, may_fail=True)
    cluster.close()
