"""Links between real agents that are cut, refused and black-holed while operations are under way."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import numpy as np
import pytest
from tests.integration.agents import AgentProcess, StartAgent
from tests.integration.test_agent import BOUND, group
from tests.support.proxy import Proxied, name

from allreduced.client import AsyncCommunicator
from allreduced.core.errors import ClusterError, PeerLost

COUNT = 4 << 20
"""Elements of one operation: 16 MiB of float32."""

NEVER = "600"
"""A failure timeout that is far beyond what a test takes: what is noticed was not noticed by silence."""


@contextmanager
def proxied(
    start_agent: StartAgent, nodes: int, timeout: str, **environment: str
) -> Iterator[tuple[Proxied, list[AgentProcess]]]:
    """Start agents that reach each other through a proxy."""
    network = Proxied(nodes)
    try:
        agents = []
        for node in range(nodes):
            agent = start_agent(
                name(node),
                *network.arguments(node),
                ALLREDUCED_FAILURE_FAILURE_TIMEOUT=timeout,
                ALLREDUCED_FAILURE_DEADLINE="1000",
                **environment,
            )
            network.started(node, agent.listen)
            agents.append(agent)
        yield network, agents
        for agent in agents:
            agent.process.send_signal(signal.SIGCONT)
            agent.process.send_signal(signal.SIGTERM)
        for agent in agents:
            agent.wait()
    finally:
        network.close()


class Stream:
    """All ranks of a group reduce large arrays without end, several at a time; every result is checked."""

    def __init__(self, ranks: Sequence[AsyncCommunicator]) -> None:
        self._ranks = ranks
        self._arrays = [np.full(COUNT, rank + 1, "float32") for rank in range(len(ranks))]
        self._total = float(sum(range(1, len(ranks) + 1)))
        self._done = asyncio.Condition()
        self._stopped = False
        self.count = 0

    async def more(self, operations: int) -> None:
        """Return when so many further operations have ended well."""
        async with self._done:
            target = self.count + operations
            await self._done.wait_for(lambda: self.count >= target)

    async def run(self) -> None:
        """Reduce until stopped; raise the first error."""
        async with asyncio.TaskGroup() as tasks:
            for lane in range(3):
                tasks.create_task(self._lane(lane))

    async def _lane(self, lane: int) -> None:
        step = 0
        while not self._stopped:
            scale = float(step % 7 + 1)
            results = await asyncio.gather(
                *(
                    rank.all_reduce(array * scale, name=f"lane{lane}")
                    for rank, array in zip(self._ranks, self._arrays, strict=True)
                )
            )
            for result in results:
                assert float(result[0]) == float(result[-1]) == self._total * scale
                assert np.all(result == result[0])
            step += 1
            async with self._done:
                self.count += 1
                self._done.notify_all()

    def stop(self) -> None:
        """End after the operations under way."""
        self._stopped = True


@asynccontextmanager
async def streaming(ranks: Sequence[AsyncCommunicator]) -> AsyncIterator[Stream]:
    """Run a stream meanwhile; its errors are raised here."""
    async with asyncio.TaskGroup() as tasks:
        stream = Stream(ranks)
        tasks.create_task(stream.run())
        yield stream
        stream.stop()


async def test_a_link_that_is_cut_and_restored_during_large_operations_is_no_error(start_agent: StartAgent) -> None:
    with proxied(start_agent, 3, NEVER) as (network, agents):
        async with asyncio.timeout(3 * BOUND), group(agents, 3) as ranks, streaming(ranks) as stream:
            await stream.more(2)
            for one, other in ((0, 1), (1, 2), (2, 0), (0, 1)):
                network.cut(one, other)
                network.heal()
                await stream.more(2)
    assert_links_lost_only(agents)


async def test_a_connection_that_one_side_has_lost_during_large_operations_is_no_error(start_agent: StartAgent) -> None:
    with proxied(start_agent, 3, "8.0") as (network, agents):
        async with asyncio.timeout(3 * BOUND), group(agents, 3) as ranks, streaming(ranks) as stream:
            await stream.more(2)
            for one, other in ((0, 1), (1, 0), (1, 2)):
                network.half_open(one, other)
                await stream.more(2)
    assert_links_lost_only(agents)


def assert_links_lost_only(agents: Sequence[AgentProcess]) -> None:
    """Check that every agent lost a link and none lost a peer."""
    for agent in agents:
        assert agent.says("event=link_lost")
        log = agent.logged()
        assert "event=peer_lost" not in log
        assert "defect" not in log


async def in_flight(ranks: Sequence[AsyncCommunicator]) -> list[asyncio.Task[object]]:
    """Return an operation of all but the last rank, which waits for that one."""

    async def call(rank: AsyncCommunicator) -> object:
        return await rank.all_reduce(np.ones(COUNT, "float32"), name="last")

    waiting = [asyncio.create_task(call(rank)) for rank in ranks[:-1]]
    await asyncio.sleep(0)
    return waiting


async def assert_lost(waiting: Sequence[asyncio.Task[object]], node: int) -> None:
    """Wait for the operations; each must have failed because of the node."""
    for work in waiting:
        with pytest.raises(PeerLost) as caught:
            await work
        assert caught.value.nodes == (name(node),)
        assert caught.value.ranks == (node,)


async def test_an_agent_whose_address_refuses_connections_is_lost_at_once(start_agent: StartAgent) -> None:
    with proxied(start_agent, 3, NEVER, ALLREDUCED_AGENT_LOG_LEVEL="debug") as (network, agents):
        async with asyncio.timeout(BOUND), group(agents, 3) as ranks:
            for agent in agents[:2]:  # it dialled before its own address could be reached; now they know where it is
                await until_logged(agent, f"event=address_led peer={name(2)} ", 1)
            waiting = await in_flight(ranks)
            agents[2].kill()
            network.gone(2)
            await assert_lost(waiting, 2)
        assert [agent.stop() for agent in agents[:2]] == [0, 0]
        assert "proven=True" in agents[0].logged() + agents[1].logged()


async def test_an_agent_behind_a_black_hole_is_lost_after_the_failure_timeout_and_learns_so_itself(
    start_agent: StartAgent,
) -> None:
    with proxied(start_agent, 3, "3.0") as (network, agents):
        async with asyncio.timeout(BOUND), group(agents, 3) as ranks:
            waiting = await in_flight(ranks)
            for other in (0, 1):
                network.black_hole(2, other)
                network.black_hole(other, 2)
            await assert_lost(waiting, 2)
            with pytest.raises(ClusterError):
                await ranks[2].all_reduce(np.ones(COUNT, "float32"), name="last")
            network.heal()
        # Once they hear each other again they work together.
        async with asyncio.timeout(BOUND), group(agents, 3, "again") as ranks:
            results = await asyncio.gather(*(rank.all_reduce(np.ones(9)) for rank in ranks))
        assert [result.tolist() for result in results] == [[3.0] * 9] * 3


async def test_a_black_hole_that_is_shorter_than_the_failure_timeout_is_no_error(start_agent: StartAgent) -> None:
    with proxied(start_agent, 2, NEVER) as (network, agents):
        async with asyncio.timeout(BOUND), group(agents, 2) as ranks, streaming(ranks) as stream:
            await stream.more(2)
            for ways in ([(0, 1)], [(1, 0)], [(0, 1), (1, 0)]):
                for way in ways:
                    network.black_hole(*way)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await stream.more(1000)
                network.heal()
                await stream.more(2)
        assert [agent.logged() for agent in agents] == ["", ""]


async def until_logged(agent: AgentProcess, text: str, times: int = 1) -> None:
    """Return once the agent has logged the text so often."""
    async with asyncio.timeout(BOUND):
        while agent.logged().count(text) < times:  # noqa: ASYNC110 # another process writes it
            await asyncio.sleep(0.01)


async def test_an_agent_that_was_stopped_charges_nobody_for_it(start_agent: StartAgent) -> None:
    settings = {"ALLREDUCED_FAILURE_FAILURE_TIMEOUT": "2.0", "ALLREDUCED_AGENT_LOG_LEVEL": "info"}
    first = start_agent("a", "--listen", "tcp://127.0.0.1:0", **settings)
    second = start_agent("b", "--listen", "tcp://127.0.0.1:0", "--peer", f"a={first.listen}", **settings)
    for agent in (first, second):
        await until_logged(agent, "event=peer_up")
    for times, (stopped, other) in enumerate(((first, second), (second, first)), 2):
        stopped.process.send_signal(signal.SIGSTOP)
        await until_logged(other, "event=peer_lost")
        stopped.process.send_signal(signal.SIGCONT)
        await until_logged(stopped, "event=peer_up", times)
        await until_logged(other, "event=peer_up", times)
        assert stopped.logged().count("event=peer_lost") == times - 2
    assert [agent.stop() for agent in (first, second)] == [0, 0]
