"""Real agents and clients on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.integration.agents import AgentProcess, NotStarted, StartAgent

from allreduced.client import AsyncCommunicator
from allreduced.core.errors import (
    AgentUnavailable,
    AuthenticationError,
    ClusterError,
    ConfigError,
    DeadlineExceeded,
    MismatchError,
    PeerLost,
    RankClaimed,
    RankLost,
)

LOOPBACK = ("--listen", "tcp://127.0.0.1:0")
BOUND = 40.0
"""Seconds in which everything must have ended; the agents' own limits are far below."""


def three_agents(start_agent: StartAgent, **environment: str) -> list[AgentProcess]:
    """Return agents a, b and c: b and c know a only, and hear of each other from it."""
    first = start_agent("a", *LOOPBACK, **environment)
    join = first.listen.removeprefix("tcp://")
    return [first, *(start_agent(node, *LOOPBACK, "--join", join, **environment) for node in "bc")]


async def join(
    agent: AgentProcess, rank: int, size: int, job: str = "job", deadline: float = 60.0
) -> AsyncCommunicator:
    """Take a rank of a job at an agent."""
    return await AsyncCommunicator.connect(
        job=job, rank=rank, size=size, local_rank=0, local_size=1, socket=agent.socket, deadline=deadline
    )


@contextlib.asynccontextmanager
async def group(agents: Sequence[AgentProcess], size: int, job: str = "job") -> AsyncIterator[list[AsyncCommunicator]]:
    """Form a group with its ranks dealt out to the agents in turns."""
    communicators = await asyncio.gather(*(join(agents[rank % len(agents)], rank, size, job) for rank in range(size)))
    try:
        yield communicators
    finally:
        await asyncio.gather(*(communicator.close() for communicator in communicators))


async def test_ranks_of_three_agents_gather_and_reduce_over_tcp(start_agent: StartAgent) -> None:
    agents = three_agents(start_agent)
    async with asyncio.timeout(BOUND), group(agents, 6) as ranks:
        assert [rank.nodes for rank in ranks] == [("a", "b", "c")] * 6
        for count in (0, 1, 5, 1000, 300_001):
            inputs = [np.arange(count, dtype="int64") * (rank + 1) - rank for rank in range(6)]
            results = await asyncio.gather(
                *(rank.all_reduce(x, op="sum") for rank, x in zip(ranks, inputs, strict=True))
            )
            expected = sum(inputs[1:], inputs[0])
            for result in results:
                assert np.array_equal(result, expected)
        floats = [np.random.default_rng(rank).standard_normal(100_003).astype("float32") for rank in range(6)]
        means = await asyncio.gather(*(rank.all_reduce(x, op="mean") for rank, x in zip(ranks, floats, strict=True)))
        np.testing.assert_allclose(means[0], np.mean(np.stack(floats, dtype="float64"), axis=0), atol=1e-6)
        assert all(mean.tobytes() == means[0].tobytes() for mean in means)
    assert [agent.stop() for agent in agents] == [0, 0, 0]
    assert [agent.logged() for agent in agents] == ["", "", ""]


async def test_agents_with_different_settings_of_links_work_together(start_agent: StartAgent) -> None:
    first = start_agent("a", *LOOPBACK, ALLREDUCED_ENGINE_TILE_BYTES="4MiB", ALLREDUCED_PEERS_FLOWS="1")
    meeting = first.listen.removeprefix("tcp://")
    second = start_agent(
        "b", *LOOPBACK, "--join", meeting, ALLREDUCED_ENGINE_TILE_BYTES="256KiB", ALLREDUCED_PEERS_FLOWS="3"
    )
    x = np.arange(3 << 20, dtype="int32")
    for agents in ([first, second], [second, first]):  # the tiles are those of rank 0's agent
        async with asyncio.timeout(BOUND), group(agents, 2) as ranks:
            results = await asyncio.gather(*(rank.all_reduce(x) for rank in ranks))
        assert all(np.array_equal(result, 2 * x) for result in results)


async def test_two_jobs_and_two_groups_at_once_do_not_mix(start_agent: StartAgent) -> None:
    agents = three_agents(start_agent)
    async with asyncio.timeout(BOUND), group(agents, 3, "one") as one, group(agents[::-1], 3, "two") as two:
        ones = [np.ones(50_000, "float32")] * 3
        results = await asyncio.gather(
            *(rank.all_reduce(x, name="x") for rank, x in zip(one, ones, strict=True)),
            *(rank.all_reduce(10 * x, name="x") for rank, x in zip(two, ones, strict=True)),
        )
    assert [float(result[0]) for result in results] == [3.0] * 3 + [30.0] * 3


async def test_a_killed_agent_is_an_error_everywhere_in_bounded_time(start_agent: StartAgent) -> None:
    agents = three_agents(start_agent, ALLREDUCED_FAILURE_FAILURE_TIMEOUT="3.0")
    async with asyncio.timeout(BOUND), group(agents, 3) as ranks:
        # Rank 2 submits nothing, so the others are in the middle of the operation.
        waiting = [asyncio.ensure_future(rank.all_reduce(np.ones(500_000, "float32"))) for rank in ranks[:2]]
        await asyncio.sleep(0)
        agents[2].kill()
        for work in waiting:
            with pytest.raises(PeerLost) as caught:
                await work
            assert (caught.value.nodes, caught.value.ranks) == (("c",), (2,))
        with pytest.raises(AgentUnavailable):
            await ranks[2].all_reduce(np.ones(1, "float32"))
        with pytest.raises(ClusterError):
            await ranks[0].all_reduce(np.ones(1, "float32"))
    assert [agent.stop() for agent in agents[:2]] == [0, 0]


async def test_a_frozen_agent_is_lost_after_the_failure_timeout(start_agent: StartAgent) -> None:
    agents = three_agents(start_agent, ALLREDUCED_FAILURE_FAILURE_TIMEOUT="3.0")
    async with asyncio.timeout(BOUND), group(agents, 3) as ranks:
        waiting = [asyncio.ensure_future(rank.all_reduce(np.ones(500_000, "float32"))) for rank in ranks[:2]]
        agents[2].process.send_signal(signal.SIGSTOP)
        try:
            for work in waiting:
                with pytest.raises(PeerLost) as caught:
                    await work
                assert (caught.value.nodes, caught.value.ranks) == (("c",), (2,))
        finally:
            agents[2].process.send_signal(signal.SIGCONT)
        with pytest.raises(PeerLost):  # it learns that the others have given it up
            await ranks[2].all_reduce(np.ones(500_000, "float32"))
    # They find each other again.
    async with asyncio.timeout(BOUND), group(agents, 3, "again") as ranks:
        results = await asyncio.gather(*(rank.all_reduce(np.ones(9)) for rank in ranks))
    assert results[2].tolist() == [3.0] * 9


async def test_the_survivors_run_the_next_job(start_agent: StartAgent) -> None:
    agents = three_agents(start_agent)
    agents[1].kill()
    async with asyncio.timeout(BOUND), group([agents[0], agents[2]], 2, "next") as ranks:
        results = await asyncio.gather(*(rank.all_reduce(np.ones(9)) for rank in ranks))
    assert [result.tolist() for result in results] == [[2.0] * 9] * 2


RANK = """
import sys
import numpy as np
from allreduced.client import connect
comm = connect(job="job", rank=int(sys.argv[2]), size=2, local_rank=0, local_size=1, socket=sys.argv[1])
print("joined", flush=True)
comm.all_reduce(np.ones(300_000))
"""


async def test_a_killed_process_is_named_at_the_other_node_and_its_rerun_works(start_agent: StartAgent) -> None:
    agents = three_agents(start_agent)
    async with asyncio.timeout(BOUND):
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RANK, agents[1].socket, "1", stdout=subprocess.PIPE
        )
        try:
            first = await join(agents[0], 0, 2)
            assert child.stdout is not None
            assert await child.stdout.readline() == b"joined\n"
        finally:
            child.kill()
            await child.wait()
        with pytest.raises(RankLost) as caught:
            await first.all_reduce(np.ones(300_000))
        assert (caught.value.ranks, caught.value.nodes) == ((1,), ("b",))
        assert f"process {child.pid}" in str(caught.value)
        await first.close()
        async with group(agents[:2], 2) as again:
            results = await asyncio.gather(*(rank.all_reduce(np.ones(3)) for rank in again))
        assert results[0].tolist() == [2.0] * 3


async def test_reruns_of_one_job_on_changing_nodes_never_meet_the_last_run(start_agent: StartAgent) -> None:
    agents = three_agents(start_agent)
    async with asyncio.timeout(BOUND):
        for run in range(12):
            order = [agents[(rank + run) % 3] for rank in range(3)]
            async with group(order, 4) as ranks:
                results = await asyncio.gather(*(rank.all_reduce(np.full(2000, run)) for rank in ranks))
            assert [result.tolist() for result in results] == [[4 * run] * 2000] * 4


async def test_gathering_errors_reach_the_caller(start_agent: StartAgent) -> None:
    agents = three_agents(start_agent)
    async with asyncio.timeout(BOUND):
        with pytest.raises(DeadlineExceeded) as late:
            await join(agents[0], 0, 3, "late", deadline=3.0)
        assert late.value.missing == (1, 2)
        sizes = await asyncio.gather(
            join(agents[0], 0, 3, "sizes"), join(agents[1], 1, 4, "sizes"), return_exceptions=True
        )
        for error in sizes:
            assert isinstance(error, MismatchError)
            assert (error.field, error.by_rank) == ("size", {0: "3", 1: "4"})
        async with group(agents[:2], 2, "held"):
            with pytest.raises(RankClaimed):
                await join(agents[2], 1, 2, "held")


async def test_garbage_on_the_port_disturbs_nobody(start_agent: StartAgent) -> None:
    agents = three_agents(start_agent)
    host, _, port = agents[0].listen.removeprefix("tcp://").rpartition(":")
    async with asyncio.timeout(BOUND), group(agents, 3) as ranks:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, b"\xff" * 7):
            with contextlib.closing(socket.create_connection((host, int(port)))) as stray:
                stray.settimeout(BOUND)
                with contextlib.suppress(ConnectionError):
                    stray.sendall(garbage)
        results = await asyncio.gather(*(rank.all_reduce(np.ones(100_000, "int32")) for rank in ranks))
    assert all(int(result.sum()) == 300_000 for result in results)


async def test_an_agent_asked_to_stop_says_goodbye(start_agent: StartAgent) -> None:
    agents = three_agents(start_agent)
    async with asyncio.timeout(BOUND), group(agents[:2], 2) as ranks:
        await asyncio.gather(*(rank.all_reduce(np.ones(10)) for rank in ranks))
        assert await asyncio.to_thread(agents[1].stop) == 0
        with pytest.raises(RankLost):  # not PeerLost: it left on purpose
            await ranks[0].all_reduce(np.ones(10))


async def test_private_agents_meet_at_one_port_and_end_with_their_last_client(
    start_agent: StartAgent, free_port: int
) -> None:
    agents = [start_agent(node, "--private", "--join", f"127.0.0.1:{free_port}") for node in "abc"]
    async with asyncio.timeout(BOUND), group(agents, 3) as ranks:
        results = await asyncio.gather(*(rank.all_reduce(np.full(200_000, 2.0)) for rank in ranks))
    assert all(float(result[-1]) == 6.0 for result in results)
    assert [await asyncio.to_thread(agent.wait) for agent in agents] == [0, 0, 0]


async def test_the_meeting_point_outlives_the_agent_of_an_earlier_job(start_agent: StartAgent, free_port: int) -> None:
    old = start_agent("old", "--private", "--join", f"127.0.0.1:{free_port}")
    first = start_agent("a", "--private", "--join", f"127.0.0.1:{free_port}")
    assert old.stop() == 0
    second = start_agent("b", "--private", "--join", f"127.0.0.1:{free_port}")
    async with asyncio.timeout(BOUND), group([first, second], 2) as ranks:
        results = await asyncio.gather(*(rank.all_reduce(np.ones(3)) for rank in ranks))
    assert results[0].tolist() == [2.0] * 3


def test_a_meeting_point_in_other_hands_is_a_clear_error(start_agent: StartAgent) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        talker = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import socket,sys; s=socket.socket(fileno=0)\nwhile 1: s.accept()[0].send(b'hi!'*99)",
            ],
            stdin=other.fileno(),
        )
        try:
            with pytest.raises(NotStarted, match="used by something that is no agent") as caught:
                start_agent("a", "--private", "--join", f"127.0.0.1:{port}")
        finally:
            talker.kill()
            talker.wait()
    assert isinstance(caught.value.error, ConfigError)
    assert caught.value.status == 2


def test_another_secret_is_a_clear_error(start_agent: StartAgent) -> None:
    first = start_agent("a", *LOOPBACK, ALLREDUCED_SECRET="one")
    meeting = first.listen.removeprefix("tcp://")
    with pytest.raises(NotStarted) as caught:
        start_agent("b", *LOOPBACK, "--join", meeting, ALLREDUCED_SECRET="two")
    assert isinstance(caught.value.error, AuthenticationError)
    with pytest.raises(NotStarted) as caught:
        start_agent("b", *LOOPBACK, "--join", meeting)
    assert "ALLREDUCED_SECRET" in str(caught.value.error)


def test_an_open_port_without_a_secret_is_refused(start_agent: StartAgent) -> None:
    with pytest.raises(NotStarted) as caught:
        start_agent("a", "--listen", "tcp://0.0.0.0:0")
    assert "ALLREDUCED_SECRET" in caught.value.stderr
    assert "ALLREDUCED_INSECURE=1" in caught.value.stderr
    assert start_agent("a", "--listen", "tcp://0.0.0.0:0", ALLREDUCED_INSECURE="1").stop() == 0


def test_a_port_in_use_is_a_clear_error(start_agent: StartAgent) -> None:
    first = start_agent("a", *LOOPBACK)
    with pytest.raises(NotStarted, match="in use") as caught:
        start_agent("b", "--listen", first.listen)
    assert isinstance(caught.value.error, ConfigError)
    assert caught.value.status == 2
    assert "Traceback" not in caught.value.stderr


def test_a_wrong_setting_is_a_clear_error(start_agent: StartAgent, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[engine]\nthreds = 2\n")
    with pytest.raises(NotStarted, match="did you mean 'threads'") as caught:
        start_agent("a", "--config", str(config))
    assert caught.value.status == 2


def test_an_agent_alone_opens_no_port(start_agent: StartAgent) -> None:
    agent = start_agent("a")
    assert agent.listen == ""
    agent.process.send_signal(signal.SIGINT)
    assert agent.wait() == 0


def test_an_agent_started_by_hand_says_when_it_is_ready_and_where() -> None:
    name = f"@allreduced-test-{secrets.token_hex(8)}"
    command = (sys.executable, "-P", "-m", "allreduced.cli.main", "agent", "--socket", name)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as agent:
        assert agent.stderr is not None
        line = agent.stderr.readline()
        agent.terminate()
        assert agent.stderr.read() == ""
    assert line == f"allreduced: the agent is ready: clients at {name}, no other agents\n"
    assert agent.returncode == 0
