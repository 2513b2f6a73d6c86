"""Hundreds of real kills, pauses and cuts, and how fast they are noticed.

``KILLS``: how many faults. ``CHAOS_SEED``: draws them. ``CHAOS_TIMEOUT``: the failure timeout in seconds.
``CHAOS_SLACK``: seconds beyond a bound after which a process is past it; a machine with other work needs more.
``SATURATED``: seconds with all cores taken by other work.
"""

from __future__ import annotations

import collections
import os
import random
import subprocess
import sys
import time

import pytest
from tests.chaos.cluster import Cluster, Work
from tests.chaos.faults import ON_CABLES, ON_PROCESSES, ON_PROXIES, SILENCES, Fault, Kind, fault_of
from tests.chaos.namespaces import Namespaces, NotPermitted
from tests.chaos.network import Loopback, Network
from tests.chaos.rounds import Round, play
from tests.support.proxy import Proxied

KILLS = int(os.environ.get("KILLS", "300"))
SEED = os.environ.get("CHAOS_SEED", "1")
TIMEOUT = float(os.environ.get("CHAOS_TIMEOUT", "2"))
SLACK = float(os.environ.get("CHAOS_SLACK", "2"))
SATURATED = float(os.environ.get("SATURATED", "600"))
IN_TIME = 0.5
"""Seconds in which a proven death is known to all clients, and a silence that long after the failure timeout."""
SETTLE = 30.0
SPARE = 4
"""Descriptors that an agent may have more after all faults, and seconds in which it has closed the others."""

MIB = 1 << 20
MIXED = Work((4 << 10, 64 << 10, MIB, 16 * MIB))
LARGE = Work((16 * MIB,) * 3, mixed=False)

pytestmark = pytest.mark.timeout(0)


def say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n{text}", end="", flush=True)


def rounds(
    capsys: pytest.CaptureFixture[str],
    network: Network,
    faults: int,
    kinds: tuple[Kind, ...],
    work: Work,
    places: tuple[int, ...] = (0, 0, 1, 1, 2),
) -> list[Round]:
    """Play so many random faults on one cluster; print the report of each that went wrong.

    In the end the agents must hold no more than after a group that nothing happened to.
    """
    rng = random.Random(f"{SEED} {len(kinds)}")
    played = []
    with Cluster(places, network, failure_timeout=TIMEOUT) as cluster:
        cluster.form(work)
        cluster.finish()
        idle = cluster.descriptors()
        cluster.form(work)
        bag: list[Kind] = []
        for number in range(faults):
            bag = bag or rng.sample(kinds, len(kinds))
            one = play(cluster, fault_of(bag.pop(), rng, places, TIMEOUT), work, SLACK, rng)
            played.append(one)
            if one.report:
                say(capsys, f"fault {number}: {one.report}")
            elif number % 10 == 9:
                say(capsys, f"{number + 1} faults of {faults}")
        cluster.finish()
        cluster.listen(SETTLE, lambda: cluster.descriptors() <= idle + SPARE)
        say(capsys, f"descriptors of an agent: {idle} after the first group, {cluster.descriptors()} after the last")
        assert cluster.descriptors() <= idle + SPARE
        assert cluster.stop_all() == []
    return played


def test_random_faults(capsys: pytest.CaptureFixture[str]) -> None:
    cables = KILLS // 10
    played = []
    try:
        network = Namespaces(3, rate="400mbit")
    except NotPermitted as error:
        say(capsys, f"no network namespaces: {error}")
    else:
        played += rounds(capsys, network, cables, ON_CABLES, Work((4 << 10, 64 << 10, MIB)))
    both = ON_PROCESSES + ON_PROXIES
    played += rounds(capsys, Proxied(2), KILLS // 10, both, MIXED, places=(0, 0, 1))
    played += rounds(capsys, Proxied(3), KILLS - len(played), both, MIXED)
    kinds = collections.Counter(one.fault.kind for one in played)
    complaints = [complaint for one in played for complaint in one.verdict.complaints]
    wrong = sum(complaint.startswith("wrong value") for complaint in complaints)
    late = sum(", bound " in complaint for complaint in complaints)
    at_once = [t for one in played if one.fault.kind not in SILENCES for t in one.verdict.spared]
    silent = [t for one in played if one.fault.kind in SILENCES for t in one.verdict.spared]
    back = [t for one in played for t in one.verdict.cut_off]
    lines = [f"{len(played)} faults, seed {SEED}, failure timeout {TIMEOUT:g} s"]
    lines += [f"  {number:4} × {kind.value}" for kind, number in sorted(kinds.items(), key=lambda item: item[0].name)]
    lines += [
        f"wrong values: {wrong}",
        f"processes past their bound ({SLACK:g} s of slack): {late}",
        f"other complaints: {len(complaints) - wrong - late}",
        f"worst time to an error: {worst(at_once)} after what proves itself",
        f"worst time to an error: {worst(silent)} after a silence began",
        f"worst time to an error: {worst(back)} after the end of a fault, for those that it cut off",
    ]
    say(capsys, "\n".join(lines))
    assert complaints == []


def worst(times: list[float]) -> str:
    return f"{max(times):.3f} s" if times else "none"


def measure(
    capsys: pytest.CaptureFixture[str], network: Network, kind: Kind, times: int, bound: float, what: str
) -> None:
    """Let a fault of one kind hit each of four agents in turn, with 16 MiB operations in flight; print the times."""
    rng = random.Random(SEED)
    places = (0, 1, 2, 3)
    taken: list[float] = []
    complaints: list[str] = []
    with Cluster(places, network, failure_timeout=TIMEOUT) as cluster:
        cluster.form(LARGE)
        for number in range(times):
            fault = Fault(kind, number % len(places))
            one = play(cluster, fault, LARGE, 60.0, rng)
            taken += one.verdict.spared
            complaints += one.verdict.complaints
        cluster.finish()
    listed = " ".join(f"{t:.3f}" for t in sorted(taken))
    say(capsys, f"{what}: max {max(taken):.3f} s of {len(taken)}, bound {bound:g} s: {listed}")
    assert complaints == []
    assert max(taken) <= bound


def test_a_killed_agent_is_known_to_all_clients_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    measure(capsys, Loopback(), Kind.KILL_AGENT, 12, IN_TIME, "SIGKILL of one of four agents, time to the error")


@pytest.mark.parametrize("kind", [Kind.STOP_AGENT, Kind.ISOLATE])
def test_a_silent_agent_is_known_to_all_clients_after_the_failure_timeout(
    capsys: pytest.CaptureFixture[str], kind: Kind
) -> None:
    measure(capsys, Proxied(4), kind, 8, TIMEOUT + IN_TIME, f"{kind.value}, failure timeout {TIMEOUT:g} s")


def test_saturated_cores_are_no_reason_to_give_up_an_agent(capsys: pytest.CaptureFixture[str]) -> None:
    cores = len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * cores)]
    try:
        with Cluster((0, 0, 1, 1, 2), Loopback(), failure_timeout=5.0) as cluster:
            cluster.form(MIXED)
            since = time.monotonic()
            cluster.listen(SATURATED, cluster.over)
            steps = cluster.steps_since(since)
            say(capsys, f"{SATURATED:g} s with {2 * cores} busy processes on {cores} cores: {steps} steps")
            if cluster.over():
                pytest.fail(cluster.report("the group has ended"), pytrace=False)
            cluster.finish()
            assert not any(record.error or record.errors or record.wrong for record in cluster.records)
            assert cluster.stop_all() == []
    finally:
        for other in others:
            other.kill()
            other.wait()
