"""Generations end at any moment: what was delivered anywhere is delivered everywhere, and nothing is left."""

from __future__ import annotations

import random
from collections.abc import Sequence
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

from allreduced.core.errors import PeerLost, to_wire
from allreduced.daemon.engine.events import Changed, Freeze
from allreduced.daemon.losses import error_of
from allreduced.protocol.change import Change, Failure, Loss, Result


class Changes:
    """The memberships of one group, which always agree: they only take their time.

    ``dead``: nodes that die before the first change. Each change is told to every member at a moment of its own.
    """

    def __init__(self, cluster: Cluster, group: int, rng: random.Random) -> None:
        self._cluster = cluster
        self._group = group
        self._rng = rng
        self.generation = 1
        self.members = cluster.groups[group].members
        self.losses: tuple[Loss, ...] = ()

    def begin(self, dead: Sequence[str] = ()) -> None:
        """End the current generation: freeze all members, each at its time, then agree."""
        cluster, rng = self._cluster, self._rng
        for node in dead:
            cluster.nodes[node].alive = False
        alive = [member.node for member in self.members if cluster.nodes[member.node].alive]
        waiting = set(alive)

        def freeze(node: str) -> None:
            cluster.nodes[node].tell(Freeze(self._group, self.generation))
            waiting.discard(node)
            if not waiting:
                self._agree(alive)

        for node in alive:
            cluster.agenda.after(rng.random() * 5e-3, partial(freeze, node))

    def _agree(self, alive: Sequence[str]) -> None:
        cluster, rng = self._cluster, self._rng
        answers = {node: cluster.nodes[node].frozen[self._group] for node in alive}
        assert all(answer.generation == self.generation for answer in answers.values())
        holders: dict[tuple[str, int], list[int]] = {}
        failures: dict[tuple[str, int], Failure] = {}
        for node in alive:
            for result in answers[node].results:
                holders.setdefault((result.name, result.use), []).extend(result.holders)
            for failure in answers[node].failures:
                failures.setdefault((failure.name, failure.use), failure)
        assert not holders.keys() & failures.keys()
        self.losses += tuple(
            Loss(member.node, member.ranks, True, True, to_wire(PeerLost(f"{member.node} died")))
            for member in self.members
            if member.node not in alive
        )
        last = max(answer.round for answer in answers.values())
        change = Change(
            self.generation + 1,
            tuple(member for member in self.members if member.node in alive),
            self.losses,
            bool(self.losses),
            (),
            tuple(Result(name, use, tuple(sorted(held))) for (name, use), held in holders.items()),
            tuple(failures.values()),
            last,
            next(answer.refused for answer in answers.values() if answer.round == last),
        )
        event = Changed(self._group, self.generation, change)
        self.generation += 1
        self.members = change.members
        for node in alive:
            cluster.agenda.after(rng.random() * 5e-3, partial(cluster.nodes[node].tell, event))


def _setup(seed: int, deadline: float) -> tuple[random.Random, Cluster, list[Planned], dict[int, list[object]]]:
    rng = random.Random(seed)
    cluster = Cluster(seed, random_layouts(rng), random_limits(rng))
    planned = plan(cluster, rng, rng.choice((3, 8, 20)))
    return rng, cluster, planned, submit_all(cluster, rng, planned, deadline=deadline)  # type: ignore[return-value]


def _reset_links(cluster: Cluster, changes: Sequence[Changes], *, lossy: bool) -> None:
    """End the generations of all groups; ``lossy``: and lose what is on its way."""
    if lossy:
        cluster.network.reset()
    for one in changes:
        one.begin()


def _one_outcome(cluster: Cluster, planned: Sequence[Planned], requests: dict[int, list[object]]) -> None:
    """Check that all ranks on nodes that live have the same outcome of each operation."""
    for index in range(len(planned)):
        answers = [request.answers[0] for request in requests[index] if request.node.alive]  # type: ignore[attr-defined]
        kinds = {type(answer) if isinstance(answer, Exception) else None for answer in answers}
        assert len(kinds) <= 1, (planned[index].name, planned[index].use, kinds)


@over_seeds(200)
def test_a_reset_link_costs_nobody_a_result(seed: int) -> None:
    rng, cluster, planned, requests = _setup(seed, 1000.0)
    changes = [Changes(cluster, number, rng) for number in cluster.groups]
    at = 2e-3
    for _ in range(rng.choice((1, 1, 2, 3))):
        at += rng.random() * 25e-3
        cluster.agenda.at(at, partial(_reset_links, cluster, changes, lossy=rng.random() < 0.7))
        at += 30e-3
    cluster.run()
    check_results(cluster, planned, requests)  # type: ignore[arg-type]
    cluster.close()


@over_seeds(200)
def test_the_group_of_a_dead_node_ends_alike_for_all(seed: int) -> None:
    rng, cluster, planned, requests = _setup(seed, 1000.0)
    dead = rng.choice(list(cluster.nodes))
    at = 2e-3 + rng.random() * 30e-3
    ended = []
    for number, group in cluster.groups.items():
        if any(member.node == dead for member in group.members):
            changes = Changes(cluster, number, rng)
            ended.append((number, changes))
            cluster.agenda.at(at, partial(changes.begin, [dead]))
            if rng.random() < 0.3:
                others = [member.node for member in group.members if member.node != dead]
                cluster.agenda.at(at + 30e-3, partial(changes.begin, others[:1]))
    cluster.run()
    for number, changes in ended:
        for index, operation in enumerate(planned):
            for request in requests[index] if operation.group == number else ():
                answer = request.answers[0] if request.node.alive else None  # type: ignore[attr-defined]
                if isinstance(answer, Exception):
                    assert str(answer).startswith(str(error_of(changes.losses[:1])))
    check_results(cluster, planned, requests, may_fail=True)  # type: ignore[arg-type]
    cluster.close()


@over_seeds(100)
def test_deadlines_and_changes_end_operations_alike(seed: int) -> None:
    rng, cluster, planned, requests = _setup(seed, random.Random(seed).choice((4e-3, 10e-3, 20e-3)))
    changes = [Changes(cluster, number, rng) for number in cluster.groups]
    cluster.agenda.at(2e-3 + rng.random() * 25e-3, partial(_reset_links, cluster, changes, lossy=True))
    cluster.run()
    _one_outcome(cluster, planned, requests)
    check_results(cluster, planned, requests, may_fail=True)  # type: ignore[arg-type]
    cluster.close()
