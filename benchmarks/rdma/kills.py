"""Many operations while one agent after the other is killed: every value right, nothing hangs, nothing is left held."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.cluster import Cluster, Work
from tests.chaos.faults import Kind, fault_of
from tests.chaos.rounds import play
from tests.rdma import resources
from tests.rdma.addresses import Addresses
from tests.rdma.nursery import Nursery
from tests.rdma.starter import FromNursery

WORK = Work((4 << 10, 64 << 10, 1 << 20))
MOST_STEPS = 12
"""Steps of a group before an agent is killed, at most; each is six collectives."""
TIMEOUT = 20.0
"""The failure timeout of the agents: with less, a busy machine keeps the emulated one from finishing its handshakes. A
death that refused connections prove is known at once all the same."""
SLACK = 60.0
"""Seconds beyond every bound that the emulation may take."""
PATIENCE = 120.0
NOT_REGIONS = tuple(kind for kind in resources.KINDS if kind != "mr")
"""What each link holds a fixed number of; regions come and go with the calls."""
MOST_REGIONS = 8
"""Regions per end of a link when no rank is there: the slots for messages, and the agent's own memory."""


@dataclass
class Outcome:
    """What came of it. A call counts as well ended where every rank got its result, and that was right."""

    well: int = 0
    failed: int = 0
    """Calls that ended with an error at some rank, as those under a kill do."""
    kills: int = 0
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)
    """Wrong values, ranks that disagree, errors that name the wrong ones or come too late."""
    left: dict[str, int] = field(default_factory=dict)
    """What the kernel still holds for somebody at the end."""
    unreleased: dict[str, int] = field(default_factory=dict)
    """What the living agents held after the last kill, all linked again, beyond what they held before the first one."""
    regions: int = 0
    """Memory regions that the agents held for each end of a link when the ranks were gone."""


class CountingCluster(Cluster):
    """A cluster that counts the calls of all of its groups."""

    start_seconds = 180.0
    well = failed = 0

    def form(self, work: Work) -> None:
        """Count those of the group that ended; form a new one."""
        self.count()
        super().form(work)

    def work_for(self, steps: int) -> None:
        """Return when every rank has made so many steps from now on.

        :raises Stuck: they do not.
        """
        since = time.monotonic()
        self.wait(lambda: self.steps_since(since) >= steps or self.over(), PATIENCE, f"{steps} steps")

    def count(self) -> None:
        """Count the calls of the group that there is, which is over."""
        got = Counter((record.step, name) for record in self.records for name in record.got)
        begun = {(record.step, name) for record in self.records for name in (*record.got, *record.errors)}
        well = sum(ranks == len(self.places) for ranks in got.values())
        self.well += well
        self.failed += len(begun) - well


def play_kills(
    nursery: Nursery, operations: int, seed: int, say: Callable[[str], object], *, nodes: int = 4, scheme: str = "rdma"
) -> Outcome:
    """Let a job of one rank per node make at least so many operations, under random kills of one agent at a time.

    ``say`` gets a line after each kill.

    :raises Stuck: something hangs.
    """
    rng, outcome, before = random.Random(seed), Outcome(), resources.held()
    places = tuple(range(nodes))
    network = Addresses(ALLREDUCED_PEERS_TRANSPORT=scheme)
    began = time.monotonic()
    with CountingCluster(places, network, failure_timeout=TIMEOUT, starter=FromNursery(nursery)) as cluster:
        cluster.form(WORK)
        cluster.work_for(1)
        linked = resources.held()
        while cluster.well < operations:
            cluster.work_for(rng.randrange(1, MOST_STEPS + 1))
            played = play(cluster, fault_of(Kind.KILL_AGENT, rng, places, TIMEOUT), WORK, SLACK, rng)
            outcome.kills += 1
            outcome.complaints += played.verdict.complaints
            last = f"{max(played.verdict.spared, default=0.0):.1f} s until the last error"
            say(f"  {time.monotonic() - began:4.0f} s: {cluster.well} calls; {played.fault}, {last}")
        cluster.work_for(1)
        outcome.unreleased = resources.wait_until_back(linked, kinds=NOT_REGIONS)
        cluster.finish()
        cluster.count()
        ends = nodes * (nodes - 1)
        allowed = {key: before[key] + MOST_REGIONS * ends for key in before}
        resources.wait_until_back(allowed, kinds=("mr",))
        outcome.regions = max(resources.surplus(before, resources.held(), kinds=("mr",)).values(), default=0) // ends
        if bad := [status for status in cluster.stop_all() if status]:
            outcome.complaints.append(f"agents or ranks that ended with {bad}")
        outcome.well, outcome.failed = cluster.well, cluster.failed
    outcome.seconds = time.monotonic() - began
    outcome.left = resources.wait_until_back(before)
    return outcome
