"""Clusters of agents on the guest's device: how tests make them, and what they look at."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Final

from tests.chaos.cluster import Cluster, Work
from tests.chaos.faults import Fault
from tests.chaos.rounds import Round, play
from tests.rdma.addresses import Addresses, Family
from tests.rdma.nursery import Nursery
from tests.rdma.starter import FromNursery

from allreduced.client.inquiry import ask_status
from allreduced.core.addresses import parse_socket

TIMEOUT: Final = 5.0
"""The failure timeout of the agents, in seconds."""
SLACK: Final = 60.0
"""Seconds beyond every bound that the emulation may take."""
PATIENCE: Final = 90.0
WORK: Final = Work((4 << 10, 64 << 10, 5 << 20), deadline=60.0)
"""Small tensors that travel in messages, and some of several tiles."""


class RdmaCluster(Cluster):
    """A cluster whose agents and ranks come out of the nursery.

    ``transport``: of all agents; ``own``: further variables of single ones, by name of the node. ``breakable``: their
    queue pairs can be put into the error state.
    """

    def __init__(
        self,
        places: Sequence[int],
        nursery: Nursery,
        transport: str = "rdma",
        *,
        family: Family = "ipv4",
        own: Mapping[str, Mapping[str, str]] | None = None,
        breakable: bool = False,
    ) -> None:
        network = Addresses(family, ALLREDUCED_PEERS_TRANSPORT=transport)
        main = "tests.rdma.breakable:agent" if breakable else "allreduced.cli.main:main"
        starter = FromNursery(nursery, own, main=main)
        super().__init__(places, network, failure_timeout=TIMEOUT, starter=starter)

    def break_queue_pairs(self, node: int) -> None:
        """Put all queue pairs of an agent into the error state."""
        self._agents[node].process.send_signal(signal.SIGUSR1)

    def lost_links(self, node: int) -> list[str]:
        """Return what the agent of a node has logged about links that it lost."""
        return [line for line in self.logged(node).splitlines() if "event=link_lost" in line]

    def work_for(self, steps: int) -> None:
        """Return when every rank has made so many steps from now on, each with the right values.

        :raises Stuck: they do not.
        """
        since = time.monotonic()
        self.wait(lambda: self.steps_since(since) >= steps or self.over(), PATIENCE, f"{steps} steps")
        assert not self.over(), self.report("the group has ended")
        assert self.faults() == [], self.report("wrong values or errors")

    def faults(self) -> list[str]:
        """Return what ranks of the group got that was wrong or an error."""
        return [str(record) for record in self.records if record.wrong or record.errors]

    def struck(self, fault: Fault) -> Round:
        """Let a fault happen to the group, judge what came of it, and let all work again."""
        played = play(self, fault, WORK, SLACK, random.Random(1))
        assert not played.verdict.complaints, played.report
        return played

    def links(self) -> dict[tuple[str, str], str]:
        """Return what carries the data of each link, as both of its ends tell it: ``{("node0", "node1"): "rdma"}``."""
        socket = self.socket(0)
        told = ask_status(parse_socket(socket), path=socket, others=True, timeout=PATIENCE)
        return {(agent.node, peer.node): peer.transport for agent in told.reports for peer in agent.peers}

    def ways(self, node: int) -> dict[str, str]:
        """Return what an agent tells about each of its links, for people."""
        socket = self.socket(node)
        told = ask_status(parse_socket(socket), path=socket, others=False, timeout=PATIENCE)
        return {peer.node: peer.way for peer in told.reports[0].peers}
