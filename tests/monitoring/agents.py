"""Two agents with metrics, and a job over both whose operations are known."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import numpy as np
from tests.integration.agents import AgentProcess, StartAgent
from tests.integration.test_agent import LOOPBACK, group

from allreduced.core.errors import MismatchError

METERED = {"ALLREDUCED_METRICS_LISTEN": "127.0.0.1:0", "ALLREDUCED_AGENT_LOG_LEVEL": "info"}

ENDED = {("all_reduce", "ok"): 7, ("all_reduce", "failed"): 2, ("barrier", "ok"): 3}
"""Calls of each rank in :func:`job`, by kind and outcome."""


def two_agents(start_agent: StartAgent) -> tuple[AgentProcess, AgentProcess]:
    """Return agents a and b, whose metrics are at ports that the kernel chose."""
    first = start_agent("a", *LOOPBACK, **METERED)
    return first, start_agent("b", *LOOPBACK, "--join", first.listen.removeprefix("tcp://"), **METERED)


def metrics_of(agent: AgentProcess) -> str:
    """Return host and port of an agent's metrics."""
    assert agent.says(" event=metrics_ready ")
    found = re.search(r"event=metrics_ready address=http://(\S+)", agent.logged())
    assert found is not None, agent.logged()
    return found[1]


@contextlib.asynccontextmanager
async def job(agents: tuple[AgentProcess, AgentProcess]) -> AsyncIterator[None]:
    """Run the operations of ``ENDED`` with one rank at each agent, which stay until the end."""
    async with group(agents, 2, job="train") as ranks:
        for _ in range(ENDED["all_reduce", "ok"]):
            results = await asyncio.gather(*(rank.all_reduce(np.ones(100_000)) for rank in ranks))
            assert [float(result[0]) for result in results] == [2.0, 2.0]
        for _ in range(ENDED["barrier", "ok"]):
            await asyncio.gather(*(rank.barrier() for rank in ranks))
        for _ in range(ENDED["all_reduce", "failed"]):
            wrong = (rank.all_reduce(np.ones(3 + place)) for place, rank in enumerate(ranks))
            errors = await asyncio.gather(*wrong, return_exceptions=True)
            assert [type(error) for error in errors] == [MismatchError] * 2
        yield
