"""Agents and ranks that are killed and come back: what each process is told, and how the job goes on in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.integration.agents import AgentProcess, StartAgent

from allreduced.client import AsyncCommunicator, Communicator, connect
from allreduced.client.inquiry import ask_status
from allreduced.core.addresses import parse_socket
from allreduced.core.errors import AgentUnavailable, ClusterError, PeerLost, RankClaimed, RankLost

LOOPBACK = ("--listen", "tcp://127.0.0.1:0")
BOUND = 60.0
"""Seconds in which everything must have ended; what is waited for takes milliseconds."""


async def join(agent: AgentProcess, rank: int, size: int) -> AsyncCommunicator:
    """Take a rank of the job at an agent."""
    return await AsyncCommunicator.connect(
        job="job", rank=rank, size=size, local_rank=0, local_size=1, socket=agent.socket, deadline=BOUND
    )


async def sums(ranks: list[AsyncCommunicator], count: int) -> list[list[float]]:
    """Reduce ``rank + 1`` over all ranks, ``count`` elements each, and return the results."""
    works = [rank.all_reduce(np.full(count, number + 1.0), deadline=BOUND) for number, rank in enumerate(ranks)]
    return [result.tolist() for result in await asyncio.gather(*works)]


def agent_pid(comm: Communicator | AsyncCommunicator) -> int:
    """Return the process behind the connection."""
    connection: socket.socket = comm._session._connection
    pid: int = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def gone(pid: int) -> bool:
    """Return whether not even a zombie is left of the process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def no_agent_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("ALLREDUCED_", "XDG_RUNTIME")):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_agent_here")
async def test_survivors_of_a_killed_private_agent_start_the_next_one() -> None:
    job = f"private-{secrets.token_hex(6)}"

    async def rank(number: int) -> AsyncCommunicator:
        return await AsyncCommunicator.connect(job=job, rank=number, size=2, deadline=BOUND)

    async with asyncio.timeout(BOUND):
        ranks = list(await asyncio.gather(rank(0), rank(1)))
        pids = [agent_pid(ranks[0])]
        for turn in range(2):
            assert await sums(ranks, 5000) == [[3.0] * 5000] * 2
            buffer = await ranks[0].zeros(5000)
            pending = ranks[0].all_reduce(buffer, name="half")
            os.kill(pids[-1], signal.SIGKILL)
            for work in (pending, ranks[1].barrier()):
                with pytest.raises(AgentUnavailable):
                    await work
            if turn == 0:  # by themselves
                assert await sums(ranks, 5000) == [[3.0] * 5000] * 2
            else:  # by connecting anew, one with and one without having closed the old communicator
                await ranks[0].close()
                broken, ranks = ranks[1], list(await asyncio.gather(rank(0), rank(1)))
                with pytest.raises(RankClaimed):
                    await broken.barrier()
                await broken.close()
                works = [ranks[0].all_reduce(buffer + 1), ranks[1].all_reduce(buffer)]
                assert [result.tolist() for result in await asyncio.gather(*works)] == [[1.0] * 5000] * 2
            pids.append(agent_pid(ranks[0]))
            assert gone(pids[-2])
        assert len(set(pids)) == 3
        for comm in ranks:
            await comm.close()
        await asyncio.to_thread(os.waitpid, pids[-1], 0)


@pytest.mark.usefixtures("no_agent_here")
def test_a_blocking_rank_starts_the_next_private_agent_too() -> None:
    with connect(job=f"private-{secrets.token_hex(6)}", rank=0, size=1) as comm:
        first = agent_pid(comm)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(AgentUnavailable):
            comm.all_reduce(np.ones(5000))
        assert comm.all_reduce(np.full(5000, 2.0)).tolist() == [2.0] * 5000
        second = agent_pid(comm)
        assert gone(first)
    os.waitpid(second, 0)


async def test_the_agent_of_one_node_is_killed_and_started_again(start_agent: StartAgent) -> None:
    first = start_agent("a", *LOOPBACK)
    meeting = first.listen.removeprefix("tcp://")
    agents = [first, *(start_agent(node, *LOOPBACK, "--join", meeting) for node in "bc")]
    async with asyncio.timeout(BOUND):
        ranks = list(await asyncio.gather(*(join(agents[rank], rank, 3) for rank in range(3))))
        assert await sums(ranks, 5000) == [[6.0] * 5000] * 3
        buffer = await ranks[2].empty(5000)
        works = [rank.all_reduce(np.ones(500_000)) for rank in ranks[:2]]
        agents[2].kill()
        for work in works:
            with pytest.raises(PeerLost) as caught:
                await work
            assert (caught.value.nodes, caught.value.ranks) == (("c",), (2,))
        with pytest.raises(AgentUnavailable):
            await ranks[2].all_reduce(buffer)
        for rank in ranks[:2]:  # until it is formed anew
            with pytest.raises(PeerLost):
                await rank.barrier()
        # The rank of the lost agent waits for it with the very same communicator; the others form the group anew.
        waiting = ranks[2].all_reduce(np.full(5000, 3.0), deadline=BOUND)
        agents[2] = start_agent("c", *LOOPBACK, "--join", meeting, "--socket", agents[2].socket)
        await ranks[0].close()  # rank 1's broken communicator stays open
        broken, ranks[:2] = ranks[1], await asyncio.gather(*(join(agents[rank], rank, 3) for rank in range(2)))
        others = [rank.all_reduce(np.full(5000, number + 1.0)) for number, rank in enumerate(ranks[:2])]
        assert [result.tolist() for result in await asyncio.gather(*others, waiting)] == [[6.0] * 5000] * 3
        assert [rank.nodes for rank in ranks] == [("a", "b", "c")] * 3
        assert await sums(ranks, 300_000) == [[6.0] * 300_000] * 3
        with pytest.raises(PeerLost):
            await broken.barrier()
        for rank in (broken, *ranks):
            await rank.close()
    assert [agent.stop() for agent in agents] == [0, 0, 0]


@pytest.mark.parametrize("again", ["the same communicator", "connect"])
def test_an_agent_that_hung_and_goes_on_has_the_rank_free(
    start_agent: StartAgent, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    monkeypatch.setattr("allreduced.client.session.GRACE_SECONDS", 0.0)
    agent = start_agent("a", ALLREDUCED_FAILURE_FAILURE_TIMEOUT="0.2")

    def alone() -> Communicator:
        return connect(job="job", rank=0, size=1, socket=agent.socket, deadline=BOUND)

    with contextlib.ExitStack() as stack:
        comm = stack.enter_context(alone())
        view = comm.all_reduce(np.full(5000, 2.0), view=True)
        agent.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(AgentUnavailable, match="did not answer, long after the deadline"):
                comm.all_reduce(np.ones(5000), deadline=0.1)
            with pytest.raises(AgentUnavailable, match=r"did not come back within 0(\.\d+)? s: .* does not answer"):
                comm.all_reduce(np.ones(5000), deadline=0.1)
        finally:
            agent.process.send_signal(signal.SIGCONT)
        if again == "connect":
            comm.close()
            comm = stack.enter_context(alone())
        assert comm.all_reduce(view, deadline=BOUND).tolist() == [2.0] * 5000
    assert agent.stop() == 0


RANK = """
import sys
import numpy as np
from allreduced.client import connect
comm = connect(job="job", rank=2, size=3, local_rank=0, local_size=1, socket=sys.argv[1])
comm.all_reduce(np.full(5000, 3.0), name="step")
print("computes", flush=True)
comm.all_reduce(np.full(5000, 3.0), name=sys.argv[2])
comm.all_reduce(np.full(5000, 3.0), name="step")
"""


async def called(agent: AgentProcess, rank: int, name: str) -> None:
    """Return once an agent has a call of this name, of a rank of its own."""
    while True:
        told = await asyncio.to_thread(ask_status, parse_socket(agent.socket), path="test", others=False, timeout=BOUND)
        running = [group for report in told.reports for group in report.groups if group.state == "running"]
        calls = [(by, one.name) for group in running for one in group.operations for by, _ in one.arrivals]
        if (rank, name) in calls:
            return


async def test_a_killed_rank_is_replaced_in_the_same_processes(start_agent: StartAgent) -> None:
    agents = [start_agent("a", *LOOPBACK)]
    agents.append(start_agent("b", *LOOPBACK, "--join", agents[0].listen.removeprefix("tcp://")))
    places = (0, 1, 1)

    async def start(name: str) -> asyncio.subprocess.Process:
        arguments = (sys.executable, "-c", RANK, agents[places[2]].socket, name)
        return await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)

    async def computes(child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"computes\n"

    async with asyncio.timeout(BOUND):
        broken: list[AsyncCommunicator] = []
        for turn in range(2):
            child = await start("nobody else's")
            try:
                ranks = list(await asyncio.gather(*(join(agents[places[rank]], rank, 3) for rank in range(2))))
                works = [rank.all_reduce(np.full(5000, 1.0), name="step") for rank in ranks]
                assert [result.tolist() for result in await asyncio.gather(*works)] == [[5.0] * 5000] * 2
                await computes(child)
                await called(agents[places[2]], 2, "nobody else's")  # it tells that it computes before it calls
                works = [rank.all_reduce(np.full(5000, 1.0), name="step") for rank in ranks]
            finally:
                child.kill()
                await child.wait()
            for work in works:
                with pytest.raises(RankLost) as caught:
                    await work
                assert (caught.value.ranks, caught.value.nodes) == ((2,), ("b",))
                said = f"rank 2 (process {child.pid} on node 'b') ended without leaving the group, while it waited for "
                assert caught.value.message.startswith(said + 'all_reduce "nobody else\'s" (its call 2), for ')
            for rank in ranks:
                with pytest.raises(ClusterError):
                    await rank.barrier()
                if turn == 0:
                    await rank.close()
            broken += ranks if turn else []
        child = await start("last")
        ranks = list(await asyncio.gather(*(join(agents[places[rank]], rank, 3) for rank in range(2))))
        for name in ("step", "last", "step"):
            works = [rank.all_reduce(np.full(5000, 1.0), name=name) for rank in ranks]
            assert [result.tolist() for result in await asyncio.gather(*works)] == [[5.0] * 5000] * 2
        assert await child.wait() == 0
        for rank in (*broken, *ranks):
            await rank.close()
    assert [agent.stop() for agent in agents] == [0, 0]


@pytest.mark.parametrize("killed", [0, 1])
async def test_private_agents_meet_again_when_one_was_killed(
    start_agent: StartAgent, free_port: int, killed: int
) -> None:
    meeting = f"127.0.0.1:{free_port}"
    agents = [start_agent(node, "--private", "--join", meeting) for node in "ab"]
    async with asyncio.timeout(BOUND):
        ranks = list(await asyncio.gather(*(join(agents[rank], rank, 2) for rank in range(2))))
        assert await sums(ranks, 5000) == [[3.0] * 5000] * 2
        agents[killed].kill()
        other = 1 - killed
        with pytest.raises(PeerLost):
            await ranks[other].all_reduce(np.ones(5000))
        with pytest.raises(AgentUnavailable):
            await ranks[killed].all_reduce(np.ones(5000))
        node, name = agents[killed].node, agents[killed].socket
        agents[killed] = start_agent(node, "--private", "--join", meeting, "--socket", name)
        waiting = ranks[killed].all_reduce(np.full(5000, killed + 1.0), deadline=BOUND)
        # The broken communicator stays until the next one is there: a private agent without clients ends.
        broken, ranks[other] = ranks[other], await join(agents[other], other, 2)
        mine = ranks[other].all_reduce(np.full(5000, other + 1.0))
        assert [result.tolist() for result in await asyncio.gather(waiting, mine)] == [[3.0] * 5000] * 2
        for rank in (broken, *ranks):
            await rank.close()
    assert [await asyncio.to_thread(agent.wait) for agent in agents] == [0, 0]


GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")

TRAINING = """
import sys
import numpy as np
from allreduced import client
from allreduced.client import AgentUnavailable, GroupChanged, PeerLost, RankLost

rank, socket = int(sys.argv[1]), sys.argv[2]
step, steps, weights = 0, 40, np.zeros(5000, "int64")

def connect():
    return client.connect(job="job", rank=rank, size=3, local_rank=0, local_size=1, socket=socket)

def compute(weights, step):
    if step % 10 == 5:
        print(step, flush=True)
        sys.stdin.readline()
    return [np.full(5000, 6.0 * (step + rank)), np.array([float(weights[0])])]

def update(weights, gradients):
    assert gradients[1][0] == weights[0]  # everybody has the same
    weights += gradients[0].astype("int64")

{loop}
print("weights", weights[0], weights[-1], flush=True)
comm.close()
"""


def training() -> str:
    """Return a program with the loop of the guide."""
    section = GUIDE.split("### Going on after a loss\n")[1]
    return TRAINING.format(loop=section.split("```python\n")[1].split("```")[0])


async def test_the_loop_of_the_guide_survives_killed_agents_and_ranks(start_agent: StartAgent, tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(training(), encoding="utf-8")
    first = start_agent("a", *LOOPBACK)
    meeting = first.listen.removeprefix("tcp://")
    agents = [first, *(start_agent(node, *LOOPBACK, "--join", meeting) for node in "bc")]

    async def start(rank: int) -> asyncio.subprocess.Process:
        command = (sys.executable, str(script), str(rank), agents[rank].socket)
        return await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    async def says(child: asyncio.subprocess.Process) -> str:
        assert child.stdout is not None
        return (await child.stdout.readline()).decode().strip()

    def go_on(children: list[asyncio.subprocess.Process]) -> None:
        for child in children:
            assert child.stdin is not None
            child.stdin.write(b"\n")

    ranks = [await start(rank) for rank in range(3)]
    try:
        async with asyncio.timeout(BOUND):
            assert [await says(rank) for rank in ranks] == ["5"] * 3
            # All stand before their call. Rank 0 goes into it, and the agent of rank 1 dies in the middle of the step.
            go_on(ranks[:1])
            agents[1].kill()
            go_on(ranks[1:])
            agents[1] = start_agent("b", *LOOPBACK, "--join", meeting, "--socket", agents[1].socket)
            assert [await says(rank) for rank in ranks] == ["5"] * 3
            go_on(ranks)
            assert [await says(rank) for rank in ranks] == ["15"] * 3
            ranks[2].kill()
            await ranks[2].wait()
            go_on(ranks[:2])
            ranks[2] = await start(2)
            assert [await says(rank) for rank in ranks] == ["15"] * 3
            go_on(ranks)
            for step in (25, 35):
                assert [await says(rank) for rank in ranks] == [str(step)] * 3
                go_on(ranks)
            total = sum(6 * (step + 1) for step in range(40))
            assert [await says(rank) for rank in ranks] == [f"weights {total} {total}"] * 3
            assert [await rank.wait() for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.kill()
            await rank.communicate()
