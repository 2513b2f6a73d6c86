"""A million operations: memory and descriptors of agents and clients stay flat."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.integration.agents import StartAgent, complaints

OPERATIONS = int(os.environ.get("OPERATIONS", "1000000"))
RANKS = 4
GROWTH = 6 << 20
"""Bytes that the resident memory of a process may be larger in the last half of the run than in the quarter before."""


@dataclass(frozen=True)
class Sample:
    operations: int
    rss: int
    descriptors: int


def sample(process: psutil.Process, operations: int) -> Sample:
    return Sample(operations, process.memory_info().rss, process.num_fds())


def check_flat(who: str, samples: list[Sample]) -> None:
    """Compare the last half with the quarter before it; the first quarter warms up."""
    warm = [one for one in samples if OPERATIONS / 4 <= one.operations <= OPERATIONS / 2]
    late = [one for one in samples if one.operations > OPERATIONS / 2]
    most, later = max(one.rss for one in warm), max(one.rss for one in late)
    assert later <= most + GROWTH, (who, most, later, samples)
    assert max(one.descriptors for one in late) <= max(one.descriptors for one in warm) + 2, (who, samples)


@pytest.mark.timeout(0)
def test_memory_and_descriptors_stay_flat(start_agent: StartAgent, capsys: pytest.CaptureFixture[str]) -> None:
    first = start_agent("a", "--listen", "tcp://127.0.0.1:0")
    second = start_agent("b", "--listen", "tcp://127.0.0.1:0", "--join", first.listen.removeprefix("tcp://"))
    agents = [first, second]
    script = str(Path(__file__).with_name("ranks.py"))
    children = [
        subprocess.Popen(
            [sys.executable, script, agents[rank % 2].socket, str(rank), str(RANKS), str(OPERATIONS)],
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(RANKS)
    ]
    samples: dict[str, list[Sample]] = {}
    watched = {agent.node: psutil.Process(agent.process.pid) for agent in agents}
    watched |= {f"rank {rank}": psutil.Process(child.pid) for rank, child in enumerate(children) if rank}
    try:
        assert children[0].stdout is not None
        for line in children[0].stdout:
            _, done, rss, descriptors = line.split()
            samples.setdefault("rank 0", []).append(Sample(int(done), int(rss), int(descriptors)))
            if int(done) < OPERATIONS:
                for who, process in watched.items():
                    samples.setdefault(who, []).append(sample(process, int(done)))
            with capsys.disabled():
                now = {who: (one[-1].rss >> 10, one[-1].descriptors) for who, one in samples.items()}
                print(f"\n{done} operations; KiB and descriptors: {now}", end="")
        assert [child.wait(60) for child in children] == [0] * RANKS
    finally:
        for child in children:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
    for who, taken in samples.items():
        check_flat(who, taken)
    assert [agent.stop() for agent in agents] == [0, 0]
    assert [complaints(agent.logged()) for agent in agents] == [[], []]
