"""Two users at the same agents: the calls of one do not wait for all that another has queued."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.integration.agents import AgentProcess, StartAgent
from tests.integration.test_agent import BOUND
from tests.integration.test_links import NEVER, proxied
from tests.support.other_user import STRANGER, only_root

from allreduced.client.inquiry import ask_status
from allreduced.core.addresses import parse_socket

USER = Path(__file__).parents[1] / "support" / "user_calls.py"
CALLS = 24
COUNT = 1 << 20
"""Elements of each: 4 MiB of float32."""


class User:
    """A process with the ranks of a job, of a user of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def begin(self) -> None:
        """Make its calls."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def ends(self) -> list[float]:
        """Return when each of its calls ended."""
        ends: list[float] = json.loads(self.says())
        assert self._process.wait(BOUND) == 0
        return ends


@contextmanager
def user(agents: Sequence[AgentProcess], uid: int, calls: int) -> Iterator[User]:
    command = [sys.executable, str(USER), f"job of {uid}", str(uid), str(calls), str(COUNT)]
    command += [agent.socket for agent in agents]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield User(process)
        finally:
            process.kill()


async def until_queued(agents: Sequence[AgentProcess], calls: dict[int, int]) -> None:
    """Return when every agent has so many operations of each uid in flight."""
    for agent in agents:
        found = None
        while found != calls:
            answer = await asyncio.to_thread(
                ask_status, parse_socket(agent.socket), path="test", others=False, timeout=BOUND
            )
            (report,) = answer.reports
            found = {group.key.uid: len(group.operations) + group.more for group in report.groups}


@only_root
async def test_one_call_of_a_user_does_not_wait_for_all_of_another(start_agent: StartAgent) -> None:
    """All are queued while nothing passes between the agents. In the order of their coming the last would end last."""
    with proxied(start_agent, 2, NEVER, ALLREDUCED_ACCESS_USERS="*") as (network, agents), ExitStack() as stack:
        many, few = (stack.enter_context(user(agents, uid, calls)) for uid, calls in ((0, CALLS), (STRANGER, 1)))
        async with asyncio.timeout(BOUND):
            assert [await asyncio.to_thread(one.says) for one in (many, few)] == ["formed"] * 2
            for way in ((0, 1), (1, 0)):
                network.black_hole(*way)
            many.begin()
            await until_queued(agents, {0: CALLS, STRANGER: 0})
            few.begin()
            await until_queued(agents, {0: CALLS, STRANGER: 1})
            network.heal()
            (one,) = await asyncio.to_thread(few.ends)
            ends = await asyncio.to_thread(many.ends)
        before = sum(end < one for end in ends)
        assert before < CALLS // 2
