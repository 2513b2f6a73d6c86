"""Prints the table of RDMA figures; see README.md. Runs in the guest of ``tests/rdma/guest``."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from benchmarks.rdma import kills, limits, link, ring
from benchmarks.rdma.link import Transfers
from tests.integration.agents import AgentProcess, end_processes
from tests.rdma import resources
from tests.rdma.addresses import Addresses, host
from tests.rdma.nursery import Copy, Nursery, clean_environment
from tests.rdma.starter import FromNursery

MIB: Final = 1 << 20
TRANSFER, REDUCED, MEMBERS = 64 * MIB, 16 * MIB, 4
LINK_GOAL, RING_GOAL = 0.8, 1.4


def main() -> int:
    """Measure what was asked for; return 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rdma", description=__doc__)
    parser.add_argument("--parts", default="link,ring,kills", help="which, by commas (default: all)")
    parser.add_argument("--scheme", default="rdma", help="transport of the link (default: rdma)")
    parser.add_argument("--times", type=int, default=5, help="calls of which the median counts (default: 5)")
    parser.add_argument("--operations", type=int, default=1000, help="under kills (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, help="of the kills (default: 1)")
    chosen = parser.parse_args()
    parts = chosen.parts.split(",")
    with Nursery() as nursery:
        kept = [
            *(_link(nursery, chosen.scheme, chosen.times) if "link" in parts else ()),
            *(_ring(nursery, chosen.scheme, chosen.times) if "ring" in parts else ()),
            *(_kills(nursery, chosen.scheme, chosen.operations, chosen.seed) if "kills" in parts else ()),
        ]
    return 0 if all(kept) else 1


def _link(nursery: Nursery, scheme: str, times: int) -> list[bool]:
    def start(address: str) -> Copy:
        return nursery.start(
            "benchmarks.rdma.link:serve", [address], clean_environment(), sys.stderr.buffer, pipes=True
        )

    bare = [limits.write_bandwidth(TRANSFER, MIB)]
    ours = link.measure(start, f"{scheme}://{host(0)}:0", TRANSFER, times)
    bare.append(limits.write_bandwidth(TRANSFER, MIB))
    speed = TRANSFER / statistics.median(ours.sending)
    best = max(bare)
    _say("")
    _say(f"64 MiB from one process to another over {scheme}://, {times} times")
    _say(f"  ib_write_bw, 1 MiB messages, before and after  {_rates(bare)}")
    _say(f"  a link                                         {_rates([TRANSFER / s for s in ours.sending])}")
    _say(f"  with posting and token                         {_rates([TRANSFER / s for s in ours.whole])}")
    return [
        _goal(
            f"median of the link / best of ib_write_bw = {speed / best:.2f}", speed / best >= LINK_GOAL, "at least 0.8"
        ),
        *(_counters(ours) if scheme == "rdma" else ()),
    ]


def _counters(ours: Transfers) -> list[bool]:
    copied = ours.near.bytes_copied + ours.far.bytes_copied
    near, far = (stats.completion_events / ours.tiles for stats in (ours.near, ours.far))
    return [
        _goal(f"payload copied in user space, both ends: {copied} bytes", copied == 0, "none"),
        _goal(
            f"completion events per tile: {near:.2f} at the sender, {far:.2f} at the receiver ({ours.tiles} tiles)",
            max(near, far) <= 1.0,
            "at most 1",
        ),
    ]


def _ring(nursery: Nursery, scheme: str, times: int) -> list[bool]:
    def start(words: Sequence[str]) -> Copy:
        return nursery.start("benchmarks.rdma.ring:rank", words, clean_environment(), log, pipes=True)

    network = Addresses(ALLREDUCED_PEERS_TRANSPORT=scheme)
    started: list[AgentProcess] = []
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.NamedTemporaryFile(mode="w+b"))
        stack.callback(end_processes, started)
        for node in range(MEMBERS):
            agent = FromNursery(nursery).agent(f"node{node}", network.arguments(node), network.environment(), log)
            network.started(node, agent.listen)
            started.append(agent)
        sockets = [agent.socket for agent in started]
        tried = limits.ring_seconds(MEMBERS, REDUCED, 1)
        variant = min(tried, key=tried.__getitem__)
        bare = limits.ring_seconds(MEMBERS, REDUCED, times, variant)[variant]
        ours = ring.measure(start, sockets, REDUCED, times)
        again = limits.ring_seconds(MEMBERS, REDUCED, times, variant)[variant]
        log.seek(0)
        said = log.read().decode()
    ratio = statistics.median(ours) / min(bare, again)
    _say("")
    _say(f"all-reduce of 16 MiB of float32 over {MEMBERS} agents, 1 rank each, {times} times; every sum was checked")
    _say(f"  bare ring, best variant ({variant})  {bare:.3f} s before, {again:.3f} s after")
    _say(f"  ours, slowest rank                    {_seconds(ours)}")
    if said:
        _say("  the agents said: " + said.strip().replace("\n", "\n    "))
    return [_goal(f"median of ours / best of the bare ring = {ratio:.2f}", ratio <= RING_GOAL, "at most 1.4")]


def _kills(nursery: Nursery, scheme: str, operations: int, seed: int) -> list[bool]:
    before = resources.held()
    _say("")
    outcome = kills.play_kills(nursery, operations, seed, _say, nodes=MEMBERS, scheme=scheme)
    _say(f"operations over {MEMBERS} agents under random kills of one agent, seed {seed}, {outcome.seconds:.0f} s")
    _say(f"  {outcome.well} ended well, {outcome.failed} with the error of a kill, {outcome.kills} kills; nothing hung")
    for complaint in outcome.complaints:
        _say(f"  {complaint}")
    return [
        _goal(
            f"{len(outcome.complaints)} complaints", not outcome.complaints, "none: wrong values, hangs, wrong errors"
        ),
        _goal(f"held at the end beyond {before}: {outcome.left or 'nothing'}", not outcome.left, "nothing"),
    ]


def _goal(text: str, kept: bool, goal: str) -> bool:
    _say(f"  {'held  ' if kept else 'MISSED'} {text} (goal: {goal})")
    return kept


def _rates(values: Sequence[float]) -> str:
    return "  ".join(f"{value / MIB:.1f}" for value in values) + " MiB/s"


def _seconds(values: Sequence[float]) -> str:
    return "  ".join(f"{value:.3f}" for value in values) + " s"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
