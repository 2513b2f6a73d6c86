"""What breaks under agents whose data goes by RDMA: processes, the port, the device. Nothing hangs, nothing is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.chaos.faults import SHORT, Fault, Kind
from tests.rdma import device
from tests.rdma.job import PATIENCE, TIMEOUT, WORK, RdmaCluster
from tests.rdma.nursery import Nursery


@pytest.fixture
def mended() -> Iterator[None]:
    """Bring the device and its port back after the test."""
    yield
    device.restore()


def test_an_agent_that_is_killed_is_told_of_and_replaced(nursery: Nursery) -> None:
    with RdmaCluster((0, 0, 1, 1, 2), nursery) as cluster:
        cluster.form(WORK)
        for node in (2, 0):
            cluster.struck(Fault(Kind.KILL_AGENT, node))
        cluster.work_for(2)
        assert set(cluster.links().values()) == {"rdma"}
        cluster.finish()
        assert cluster.stop_all() == []


def test_four_agents_of_two_ranks_go_on_after_a_kill_and_a_cut(nursery: Nursery) -> None:
    with RdmaCluster([rank // 2 for rank in range(8)], nursery, breakable=True) as cluster:
        cluster.form(WORK)
        cluster.struck(Fault(Kind.KILL_AGENT, 3))
        cluster.work_for(1)
        lost, before = [len(cluster.lost_links(node)) for node in range(4)], device.queue_pairs()
        assert len(before) == 4 * 3 * 2  # each agent has two flows to each other one
        cluster.break_queue_pairs(1)
        cluster.wait(
            lambda: all(len(cluster.lost_links(node)) > lost[node] for node in range(4)),
            TIMEOUT + PATIENCE,
            "the links of node 1 end",
        )
        cluster.wait(
            lambda: list(cluster.links().values()) == ["rdma"] * 12, TIMEOUT + PATIENCE, "new links, all by RDMA"
        )
        cluster.work_for(2)
        after = device.queue_pairs()
        assert (len(after), len(after & before)) == (4 * 3 * 2, 3 * 2 * 2)  # those among the other three
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


def test_queue_pairs_in_the_error_state_end_their_link_and_new_ones_are_made(nursery: Nursery) -> None:
    with RdmaCluster((0, 0, 1, 1), nursery, breakable=True) as cluster:
        cluster.form(WORK)
        cluster.work_for(1)
        before = device.queue_pairs()
        cluster.break_queue_pairs(0)
        cluster.wait(lambda: cluster.lost_links(0) and cluster.lost_links(1), TIMEOUT + PATIENCE, "the link ends")
        cluster.wait(lambda: set(cluster.links().values()) == {"rdma"}, TIMEOUT + PATIENCE, "a new link")
        cluster.work_for(2)
        assert "RDMA by rxe0: the queue pair failed" in cluster.lost_links(0)[0]
        after = device.queue_pairs()
        assert len(before) == len(after) == 4  # two flows, both ends
        assert not before & after
        assert "event=peer_lost" not in cluster.logged(0) + cluster.logged(1)
        cluster.finish()
        assert cluster.stop_all() == []


def test_a_port_that_goes_down_ends_the_links_with_a_reason_and_the_job_goes_on(nursery: Nursery, mended: None) -> None:
    """The agents reach each other by TCP all the time, here within one machine: so they go on by that."""
    with RdmaCluster((0, 0, 1, 1), nursery, "auto") as cluster:
        cluster.form(WORK)
        cluster.work_for(1)
        assert set(cluster.links().values()) == {"rdma"}
        device.port_down()
        _goes_on_by_tcp(cluster)
        for node in (0, 1):  # the end that is told later hears of a reset first, and says what its own device knows
            ends = cluster.lost_links(node)
            assert all("RDMA by rxe0: the port" in line for line in ends), ends
        cluster.finish()
        assert cluster.stop_all() == []


def test_a_device_that_is_removed_is_let_go_of_and_the_job_goes_on(nursery: Nursery, mended: None) -> None:
    """The driver of soft-RoCE tells programs nothing: the removal waits until the agents have closed the device."""
    with RdmaCluster((0, 0, 1, 1), nursery, "auto") as cluster:
        cluster.form(WORK)
        cluster.work_for(1)
        assert set(cluster.links().values()) == {"rdma"}
        device.remove()
        _goes_on_by_tcp(cluster)
        ends = cluster.lost_links(0) + cluster.lost_links(1)
        assert any("RDMA by rxe0: the device was removed" in line for line in ends), ends
        (way,) = cluster.ways(0).values()
        assert way.removeprefix("the other end declined: ") == "this machine has no RDMA device"
        device.restore()
        cluster.struck(Fault(Kind.KILL_AGENT, 1))  # what starts anew finds the device
        cluster.work_for(1)
        assert set(cluster.links().values()) == {"rdma"}
        cluster.finish()
        assert cluster.stop_all() == []


def _goes_on_by_tcp(cluster: RdmaCluster) -> None:
    cluster.wait(lambda: set(cluster.links().values()) == {"tcp"}, TIMEOUT + PATIENCE, "TCP without the device")
    cluster.wait(lambda: cluster.lost_links(0) and cluster.lost_links(1), PATIENCE, "both say that they lost the link")
    cluster.work_for(2)
    assert "event=peer_lost" not in cluster.logged(0) + cluster.logged(1)
