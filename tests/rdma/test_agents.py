"""Agents whose data goes by RDMA: right values over every layout, and what the status says of their links."""

from __future__ import annotations

import itertools

import pytest
from tests.rdma.job import WORK, RdmaCluster
from tests.rdma.nursery import Nursery


@pytest.mark.parametrize("nodes", [2, 4])
def test_two_ranks_on_each_of_several_agents(nursery: Nursery, nodes: int) -> None:
    with RdmaCluster([rank // 2 for rank in range(2 * nodes)], nursery) as cluster:
        cluster.form(WORK)
        cluster.work_for(3)
        names = [cluster.name(node) for node in range(nodes)]
        assert cluster.links() == dict.fromkeys(itertools.permutations(names, 2), "rdma")
        assert all(way.startswith("rxe0 port 1") for way in cluster.ways(0).values())
        cluster.finish()
        assert cluster.stop_all() == []


def test_addresses_of_ipv6(nursery: Nursery) -> None:
    with RdmaCluster((0, 1), nursery, family="ipv6") as cluster:
        cluster.form(WORK)
        cluster.work_for(2)
        assert set(cluster.links().values()) == {"rdma"}
        assert "fd77::" in cluster.ways(0)["node1"]
        cluster.finish()


def test_a_job_with_links_of_both_kinds(nursery: Nursery) -> None:
    """Who cannot or does not want RDMA takes TCP with everybody; the others have it among themselves."""
    own = {"node2": {"ALLREDUCED_PEERS_TRANSPORT": "tcp"}}
    with RdmaCluster((0, 1, 2), nursery, "auto", own=own) as cluster:
        cluster.form(WORK)
        cluster.work_for(3)
        kinds = {frozenset(pair): kind for pair, kind in cluster.links().items()}
        assert kinds == {
            frozenset({"node0", "node1"}): "rdma",
            frozenset({"node0", "node2"}): "tcp",
            frozenset({"node1", "node2"}): "tcp",
        }
        cluster.finish()
        assert cluster.stop_all() == []
