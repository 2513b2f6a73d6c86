"""Many operations, many agents, slow clients, and too little memory: real agents and clients."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing

import numpy as np
import pytest
from tests.integration.agents import AgentProcess, StartAgent, complaints
from tests.support.local_plane import RawClient, submit

from allreduced.client import AsyncCommunicator
from allreduced.core.dtypes import DType
from allreduced.core.errors import LimitExceeded, RankLost
from allreduced.core.reductions import Reduction
from allreduced.protocol.local import Done, Join, Joined

BOUND = 60.0
"""Seconds in which everything must have ended; the agents' own limits are far below."""

MIB = 1 << 20


def two_agents(start_agent: StartAgent, **environment: str) -> list[AgentProcess]:
    first = start_agent("a", "--listen", "tcp://127.0.0.1:0", **environment)
    join = first.listen.removeprefix("tcp://")
    return [first, start_agent("b", "--listen", "tcp://127.0.0.1:0", "--join", join, **environment)]


async def attach(agent: AgentProcess, rank: int, size: int, job: str = "job") -> AsyncCommunicator:
    return await AsyncCommunicator.connect(
        job=job, rank=rank, size=size, local_rank=0, local_size=1, socket=agent.socket, deadline=BOUND
    )


@asynccontextmanager
async def group(agents: Sequence[AgentProcess], size: int, job: str = "job") -> AsyncIterator[list[AsyncCommunicator]]:
    """Form a group with its ranks dealt out to the agents in turns."""
    ranks = await asyncio.gather(*(attach(agents[rank % len(agents)], rank, size, job) for rank in range(size)))
    try:
        yield ranks
    finally:
        await asyncio.gather(*(rank.close() for rank in ranks))


async def test_a_thousand_operations_in_flight(start_agent: StartAgent) -> None:
    agents = two_agents(start_agent)
    base = np.arange(20_000, dtype="int64")
    sizes = [(7 * index) % 40 if index % 10 else 2000 * (index % 100 // 10) for index in range(1000)]

    async def call_all(rank: AsyncCommunicator) -> None:
        order = list(range(1000))
        random.Random(rank.rank).shuffle(order)
        works = {
            index: rank.all_reduce(base[: sizes[index]] + index * (rank.rank + 1), op="sum", name=f"t{index}")
            for index in order
        }
        for index, work in works.items():
            assert np.array_equal(await work, 4 * base[: sizes[index]] + 10 * index), index

    async with asyncio.timeout(BOUND), group(agents, 4) as ranks:
        await asyncio.gather(*map(call_all, ranks))
    assert [agent.stop() for agent in agents] == [0, 0]
    assert [complaints(agent.logged()) for agent in agents] == [[], []]


@pytest.mark.parametrize("piece", [1, 1 << 16])
async def test_a_client_that_reads_late_or_slowly_delays_nobody_else(start_agent: StartAgent, piece: int) -> None:
    agents = two_agents(start_agent)
    operations = 200

    async def slow() -> list[Done]:
        address = "\0" + agents[1].socket.removeprefix("@")
        with closing(RawClient.connect(address)) as client:
            await client.hello(shared_memory=False)
            await client.send(Join(1, "job", "world", 1, 2, 0, BOUND, BOUND))
            joined = await client.receive(Joined)
            payload = np.full(500, 2.0, "float32").tobytes()
            for request in range(2, operations + 2):
                await client.send(
                    submit(
                        request, group=joined.group, shape="(500,)", count=500, payload=payload, inline_result=True,
                        op=int(Reduction.SUM), dtype=int(DType.FLOAT32),
                    )
                )  # fmt: skip
            await others_done.wait()  # it reads nothing before
            client.at_once = piece
            return [await client.receive(Done) for _ in range(operations if piece > 1 else 2)]

    others_done = asyncio.Event()
    async with asyncio.timeout(BOUND):
        reading = asyncio.ensure_future(slow())
        rank = await attach(agents[0], 0, 2)
        works = [rank.all_reduce(np.full(500, index, "float32"), op="sum") for index in range(operations)]
        for index, work in enumerate(works):
            assert (await work).tolist() == [index + 2.0] * 500
        others_done.set()
        answers = await reading
        await rank.close()
    for answer in answers:
        index = answer.request - 2  # operations end in any order
        assert answer.payload == np.full(500, index + 2, "float32").tobytes()


async def test_who_keeps_views_gets_an_error_on_its_own_calls_only(start_agent: StartAgent) -> None:
    agents = two_agents(start_agent, ALLREDUCED_LIMITS_LEASE_BYTES="4MiB")
    async with asyncio.timeout(BOUND), group(agents, 4) as ranks:
        views = []

        async def step(number: int) -> object:
            works = [
                rank.all_reduce(np.full(MIB // 4, number, "float32"), op="sum", view=rank is ranks[0]) for rank in ranks
            ]
            results = await asyncio.gather(*works, return_exceptions=True)
            for result in results[1:]:
                assert isinstance(result, np.ndarray)
                assert float(result[-1]) == 4.0 * number
            return results[0]

        for number in range(4):
            views.append(await step(number))  # noqa: PERF401 # one after the other
        refused = await step(4)
        assert isinstance(refused, LimitExceeded)
        assert refused.limit == "limits.lease_bytes"
        assert [float(view[0]) for view in views if isinstance(view, np.ndarray)] == [0.0, 4.0, 8.0, 12.0]
        del views[0]
        again = await step(5)
        assert isinstance(again, np.ndarray)
        assert float(again[0]) == 20.0
        views.clear()


HOLDER = """
import sys
import numpy as np
from allreduced.client import connect
comm = connect(job="first", rank=int(sys.argv[2]), size=2, local_rank=0, local_size=1, socket=sys.argv[1])
views = [comm.all_reduce(np.ones(1 << 20, "float32"), view=True) for _ in range(4)]
print("holds", flush=True)
sys.stdin.read()
"""


async def test_memory_of_clients_that_die_with_views_comes_back(start_agent: StartAgent) -> None:
    agent = start_agent("a", ALLREDUCED_LIMITS_ARENA_BYTES="64MiB")
    async with asyncio.timeout(BOUND):
        for _ in range(2):  # twice what would fit if anything stayed
            holders = [
                await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", HOLDER, agent.socket, str(rank)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
                for rank in range(2)
            ]
            try:
                for holder in holders:
                    assert holder.stdout is not None
                    assert await holder.stdout.readline() == b"holds\n"
            finally:
                for holder in holders:
                    holder.kill()
                    await holder.wait()
        async with group([agent], 1, "second") as (rank,):
            kept = [await rank.all_reduce(np.full(1 << 20, number, "float32"), view=True) for number in range(8)]
            assert [float(view[5]) for view in kept] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
            kept.clear()


async def test_two_nodes_that_want_memory_in_opposite_order_both_get_it(start_agent: StartAgent) -> None:
    # Inputs and the slots of small ones take most of it, so that there is room for the results of a few calls only.
    agents = two_agents(start_agent, ALLREDUCED_LIMITS_ARENA_BYTES="28MiB", ALLREDUCED_ENGINE_TILE_BYTES="256KiB")
    async with asyncio.timeout(BOUND), group(agents, 2) as ranks:
        inputs = [[np.full(MIB // 4, 10 * index + rank.rank, "float32") for index in range(12)] for rank in ranks]
        for _ in range(3):
            works = {}
            for rank in ranks:
                order = range(12) if rank.rank else range(11, -1, -1)
                for index in order:
                    works[rank.rank, index] = rank.all_reduce(inputs[rank.rank][index], op="sum", name=f"t{index}")
            for (_, index), work in works.items():
                assert float((await work)[-1]) == 20.0 * index + 1.0


async def test_the_loss_of_a_rank_ends_a_thousand_operations(start_agent: StartAgent) -> None:
    agents = two_agents(start_agent)
    async with asyncio.timeout(BOUND), group(agents[:1], 1, "other") as (bystander,):
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HOLDER.replace("np.ones(1 << 20", "np.ones(0"), agents[1].socket, "1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            rank = await attach(agents[0], 0, 2, "first")
            for _ in range(4):
                await rank.all_reduce(np.ones(0, "float32"))
            works = [rank.all_reduce(np.ones(index, "float32"), name=f"t{index}") for index in range(1000)]
        finally:
            child.kill()
            await child.wait()
        for work in works:
            with pytest.raises(RankLost):
                await work
        assert float((await bystander.all_reduce(np.ones(3)))[0]) == 1.0
        await rank.close()


RANK = """
import numpy as np
from allreduced.client import connect

with connect() as comm:
    assert (comm.size, len(comm.nodes)) == (64, 32)
    for count in (1, 1000, 40_000):
        x = np.arange(count, dtype="int64") * (comm.rank + 1)
        assert np.array_equal(comm.all_reduce(x, op="sum", name="x"), np.arange(count) * 2080), count
    works = [comm.all_reduce(np.full(10, comm.rank + n), op="max", name=f"m{n}", async_op=True) for n in range(10)]
    assert [int(work.wait()[0]) for work in works] == [63 + n for n in range(10)]
    comm.barrier()
print("fine", flush=True)
"""


@pytest.mark.timeout(460)  # 96 processes on two cores, which may have other work
def test_32_agents_with_two_ranks_each() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "allreduced.cli.main", "run", "--nodes", "32", "--ranks-per-node", "2"),
            *("--no-prefix", "--grace", "60", "--", sys.executable, "-c", RANK),
        ],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | {"ALLREDUCED_FAILURE_FAILURE_TIMEOUT": "60"},  # 96 processes start at once
    )
    assert (done.returncode, complaints(done.stderr)) == (0, [])
    assert done.stdout.splitlines() == ["fine"] * 64
