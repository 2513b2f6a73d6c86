"""A client that was written from docs/protocol.md alone speaks with the agent and with ranks of the real client."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.integration.agents import StartAgent

from allreduced.client import AsyncCommunicator

EXAMPLES = Path(__file__).parents[2] / "examples"
CLIENTS = {
    # -I -S: neither allreduced nor any other package can be imported
    "python": (sys.executable, "-I", "-S", str(EXAMPLES / "plain_client.py")),
    "node": (shutil.which("node") or "", str(EXAMPLES / "node_client.mjs")),
}
BOUND = 60.0
"""Seconds in which everything must have ended."""


@pytest.mark.parametrize("language", CLIENTS)
async def test_two_plain_clients_and_one_of_ours_make_a_group(
    start_agent: StartAgent, tmp_path: Path, language: str
) -> None:
    command = CLIENTS[language]
    if not command[0]:
        pytest.skip(f"{language} is not installed")
    agent = start_agent("a", "--socket", str(tmp_path / "agent.sock"))  # Node.js does not know abstract names
    plain: list[asyncio.subprocess.Process] = []
    try:
        async with asyncio.timeout(BOUND):
            for rank in range(2):
                process = await asyncio.create_subprocess_exec(
                    *(*command, agent.socket, "plain", str(rank), "3"),
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                )
                plain.append(process)
            async with AsyncCommunicator.connect(
                job="plain", rank=2, size=3, local_rank=2, local_size=3, socket=agent.socket
            ) as comm:
                for count in (3, 1_000_000):
                    total = await comm.all_reduce(np.full(count, 3, np.float32), name=f"sum of {count}")
                    np.testing.assert_array_equal(total, np.full(count, 6, np.float32))
            for rank, process in enumerate(plain):
                out, err = await process.communicate()
                assert out.decode() == f"rank {rank} of 3 on a: 3 x 6.0\nrank {rank} of 3 on a: 1000000 x 6.0\n"
                assert err.decode() == ""
    finally:
        for process in plain:
            if process.returncode is None:
                process.kill()
            await process.wait()
    assert agent.stop() == 0
