"""Whole jobs of real agents and processes: odd shapes of clusters, killed processes, runs right after each other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence

import numpy as np
from tests.integration.agents import AgentProcess, StartAgent

from allreduced.client import AsyncCommunicator

LOOPBACK = ("--listen", "tcp://127.0.0.1:0")
BOUND = 100.0
"""Seconds in which everything must have ended; the agents' own limits are far below."""

UNEQUAL = (0, 0, 0, 1, 2, 2, 3)
"""Which agent each rank is at: four nodes with 3, 1, 2 and 1 ranks."""


def some_agents(start_agent: StartAgent, number: int, **environment: str) -> list[AgentProcess]:
    first = start_agent("a", *LOOPBACK, **environment)
    join = first.listen.removeprefix("tcp://")
    return [first, *(start_agent(node, *LOOPBACK, "--join", join, **environment) for node in "bcd"[: number - 1])]


@contextlib.asynccontextmanager
async def group(agents: Sequence[AgentProcess], places: Sequence[int]) -> AsyncIterator[list[AsyncCommunicator]]:
    """Form a group; every other rank cannot take shared memory."""
    ranks = await asyncio.gather(
        *(
            AsyncCommunicator.connect(
                job="job",
                rank=rank,
                size=len(places),
                local_rank=0,
                local_size=1,
                socket=agents[place].socket,
                deadline=BOUND,
                shared_memory=rank % 2 == 0,
            )
            for rank, place in enumerate(places)
        )
    )
    try:
        yield ranks
    finally:
        await asyncio.gather(*(rank.close() for rank in ranks))


async def test_unequal_nodes_reduce_and_broadcast_counts_that_divide_by_nothing(start_agent: StartAgent) -> None:
    agents = some_agents(start_agent, 4)
    async with asyncio.timeout(BOUND), group(agents, UNEQUAL) as ranks:
        for count in (0, 1, 2, 3, 7919, 104_729):
            inputs = [np.arange(count) * (rank + 1) - rank for rank in range(7)]
            stacked = np.stack(inputs)
            for op, wanted in (("sum", stacked.sum(0)), ("min", stacked.min(0)), ("max", stacked.max(0))):
                results = await asyncio.gather(
                    *(rank.all_reduce(x, op=op) for rank, x in zip(ranks, inputs, strict=True))
                )
                assert all(np.array_equal(result, wanted) for result in results), (count, op)
            for root in range(7):
                results = await asyncio.gather(
                    *(rank.broadcast(x, root=root) for rank, x in zip(ranks, inputs, strict=True))
                )
                assert all(np.array_equal(result, inputs[root]) for result in results), (count, root)


async def test_many_calls_in_another_order_on_every_rank_meet_by_name(start_agent: StartAgent) -> None:
    agents = some_agents(start_agent, 4)
    async with asyncio.timeout(BOUND), group(agents, UNEQUAL) as ranks:
        works = []
        for number, rank in enumerate(ranks):
            order = random.Random(number).sample(range(200), 200)
            works.append(
                {
                    which: rank.all_reduce(
                        np.full((1, 10, 3000, 50_000)[which % 4], number * which),
                        name=f"tensor{which // 2 % 50}" if which % 2 else f"only{which}",
                        priority=which % 3,
                    )
                    # Uses of one name are counted, so these keep their order; all others come in any.
                    for which in sorted(order, key=lambda which: which if which % 2 else order.index(which))
                }
            )
        for which in range(200):
            for found in works:
                result = await found[which]
                assert result.tolist() == [21 * which] * (1, 10, 3000, 50_000)[which % 4]


RANK = """
import sys
import numpy as np
from allreduced.client import AllReducedError, connect

job, rank, value, count, socket = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]
here = dict(local_rank=0, local_size=1, socket=socket[0]) if socket else dict(local_rank=rank, local_size=3)
comm = connect(job=job, rank=rank, size=3, deadline=60, **here)
x = comm.empty(count, "int64")
x.fill(value + rank)
try:
    for turn in range(1 << 30):
        y = comm.all_reduce(x, view=True)
        assert y[0] == y[-1] == y[count // 3] == 3 * value + 3, y
        del y
        if turn == 1:
            print("computes", flush=True)
except AllReducedError as error:
    print(type(error).__name__, getattr(error, "ranks", ()), flush=True)
"""


def start_ranks(job: str, value: int, count: int, agents: Sequence[AgentProcess] = ()) -> list[subprocess.Popen[str]]:
    clean = {key: text for key, text in os.environ.items() if not key.startswith(("ALLREDUCED_", "XDG_RUNTIME"))}
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, job, str(rank), str(value), str(count)]
            + ([agents[rank].socket] if agents else []),
            stdout=subprocess.PIPE,
            text=True,
            env=clean,
        )
        for rank in range(3)
    ]


def lines(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    return [process.stdout.readline().strip() if process.stdout else "" for process in processes]


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()


def test_a_killed_job_and_its_immediate_rerun_never_meet(start_agent: StartAgent) -> None:
    agents = some_agents(start_agent, 3)
    for run in range(4):
        processes = start_ranks("again", run, 20_000, agents[run % 3 :] + agents[: run % 3])
        try:
            assert lines(processes) == ["computes"] * 3
        finally:
            end(processes)


def test_reruns_with_private_agents_never_meet_the_last_run() -> None:
    job = f"private-{secrets.token_hex(6)}"
    for run in range(4):
        processes = start_ranks(job, run, 20_000)
        try:
            assert lines(processes) == ["computes"] * 3
        finally:
            end(processes)


def test_an_agent_killed_in_the_middle_of_large_operations_is_an_error_at_every_client(
    start_agent: StartAgent,
) -> None:
    agents = some_agents(start_agent, 3)
    processes = start_ranks("large", 5, 8 << 20, agents)
    try:
        assert lines(processes) == ["computes"] * 3
        agents[2].kill()
        assert lines(processes) == ["PeerLost (2,)", "PeerLost (2,)", "AgentUnavailable ()"]
    finally:
        end(processes)
    agents[2] = start_agent("c", *LOOPBACK, "--join", agents[0].listen.removeprefix("tcp://"))
    processes = start_ranks("large", 6, 8 << 20, agents)
    try:
        assert lines(processes) == ["computes"] * 3
    finally:
        end(processes)
