"""What breaks under agents whose data goes by RDMA: processes, the port, the device. Nothing hangs, nothing is left."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from tests.chaos.faults import SHORT, Fault, Kind
from tests.rdma.addresses import host
from tests.rdma.job import PATIENCE, TIMEOUT, WORK, RdmaCluster
from tests.rdma.nursery import Nursery

INTERFACE = "rdma0"


def command(*words: str) -> None:
    """Run a command of the guest that must succeed."""
    subprocess.run(words, check=True, timeout=30, capture_output=True)


@pytest.fixture
def mended() -> Iterator[None]:
    """Bring the interface and its addresses back after the test."""
    yield
    command("ip", "link", "set", INTERFACE, "up")
    for node in range(4):  # those of IPv6 go with the interface
        command("ip", "address", "replace", f"{host(node, 'ipv6').strip('[]')}/64", "dev", INTERFACE)


def test_an_agent_that_is_killed_is_told_of_and_replaced(nursery: Nursery) -> None:
    with RdmaCluster((0, 0, 1, 1, 2), nursery) as cluster:
        cluster.form(WORK)
        for node in (2, 0):
            cluster.struck(Fault(Kind.KILL_AGENT, node))
        cluster.work_for(2)
        assert set(cluster.links().values()) == {"rdma"}
        cluster.finish()
        assert cluster.stop_all() == []


def test_a_rank_that_is_killed_leaves_no_memory_registered(nursery: Nursery) -> None:
    with RdmaCluster((0, 0, 1, 1), nursery) as cluster:
        cluster.form(WORK)
        cluster.struck(Fault(Kind.KILL_RANK, 0, rank=1))
        cluster.finish()
        assert cluster.stop_all() == []


def test_an_agent_that_is_stopped_for_a_moment_is_no_error(nursery: Nursery) -> None:
    with RdmaCluster((0, 0, 1, 1), nursery) as cluster:
        cluster.form(WORK)
        cluster.struck(Fault(Kind.PAUSE_AGENT, 1, seconds=SHORT * TIMEOUT))
        cluster.finish()


def test_an_agent_that_is_stopped_is_lost_and_comes_back(nursery: Nursery) -> None:
    with RdmaCluster((0, 1, 2), nursery) as cluster:
        cluster.form(WORK)
        cluster.struck(Fault(Kind.STOP_AGENT, 2))
        assert set(cluster.links().values()) == {"rdma"}
        cluster.finish()


def test_a_port_that_goes_down_ends_the_links_with_a_reason_and_the_job_goes_on(nursery: Nursery, mended: None) -> None:
    """The agents reach each other by TCP all the time, here within one machine: so they go on by that.

    The device itself cannot be removed here while it is in use: soft-RoCE waits until it is not.
    """
    with RdmaCluster((0, 0, 1, 1), nursery, "auto") as cluster:
        cluster.form(WORK)
        cluster.work_for(1)
        assert set(cluster.links().values()) == {"rdma"}
        command("ip", "link", "set", INTERFACE, "down")
        cluster.wait(lambda: set(cluster.links().values()) == {"tcp"}, TIMEOUT + PATIENCE, "TCP without the port")
        cluster.work_for(2)
        ends = [line for line in cluster.logged(0).splitlines() if "event=link_lost" in line]
        assert ends
        assert all("RDMA by rxe0" in line for line in ends), ends
        assert "event=peer_lost" not in cluster.logged(0) + cluster.logged(1)
        cluster.finish()
        assert cluster.stop_all() == []
