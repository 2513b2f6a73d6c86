"""Real agents and ranks under faults at random moments, a quick selection; `make soak` does hundreds.

``CHAOS_SEED`` draws other moments and places.
"""

from __future__ import annotations

import os
import random

import pytest
from tests.chaos.cluster import Cluster, Work
from tests.chaos.faults import Kind, fault_of
from tests.chaos.namespaces import Namespaces, NotPermitted
from tests.chaos.network import Network
from tests.chaos.rounds import play
from tests.support.proxy import Proxied

SEED = os.environ.get("CHAOS_SEED", "1")
SLACK = 60.0
"""Seconds beyond every bound: the machine has other work to do."""
PLACES = (0, 0, 1, 2)
TIMEOUT = 3.0
WORK = Work((4 << 10, 256 << 10, 16 << 20))

pytestmark = pytest.mark.timeout(400)
"""What hangs is noticed, and told with all logs, by the cluster itself."""


def play_all(network: Network, kinds: list[Kind], work: Work = WORK, places: tuple[int, ...] = PLACES) -> None:
    """Play a fault of each kind; fail with everything that is to be complained of."""
    rng = random.Random(f"{SEED} {kinds}")
    with Cluster(places, network, failure_timeout=TIMEOUT) as cluster:
        cluster.form(work)
        faults = [fault_of(kind, rng, places, TIMEOUT) for kind in kinds]
        reports = [play(cluster, fault, work, SLACK, rng).report for fault in faults]
        cluster.finish()
        assert cluster.stop_all() == []
    if any(reports):
        pytest.fail("\n".join(filter(None, reports)), pytrace=False)


def test_killed_processes_are_told_of_and_replaced() -> None:
    play_all(Proxied(3), [Kind.KILL_RANK, Kind.KILL_AGENT])


def test_stopped_agents_are_given_up_after_the_failure_timeout_and_not_before() -> None:
    play_all(Proxied(3), [Kind.PAUSE_RANK, Kind.PAUSE_AGENT, Kind.STOP_AGENT])


def test_a_stopped_rank_is_named_at_the_deadline() -> None:
    play_all(Proxied(3), [Kind.STOP_RANK], Work((4 << 10,), deadline=2.0))


def test_cuts_that_are_restored_in_time_are_survived() -> None:
    kinds = [Kind.RESET, Kind.CUT, Kind.HALF_OPEN, Kind.HOLE, Kind.HOLE_ONE_WAY]
    play_all(Proxied(3), kinds)


def test_cuts_that_stay_end_the_group() -> None:
    play_all(Proxied(3), [Kind.ISOLATE, Kind.DEAF])


def test_two_nodes_that_do_not_hear_each_other_both_stop() -> None:
    play_all(Proxied(2), [Kind.ISOLATE, Kind.KILL_AGENT], places=(0, 1))


def test_cables_of_a_slow_network_are_pulled() -> None:
    try:
        network = Namespaces(3, rate="400mbit")
    except NotPermitted as error:
        pytest.skip(f"no network namespaces: {error}")
    play_all(network, [Kind.PULL_CABLE, Kind.DOWN, Kind.PULL_CABLE_LONG], Work((4 << 10, 1 << 20)))
