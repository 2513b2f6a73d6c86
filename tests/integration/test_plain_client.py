"""A client that was written from docs/protocol.md alone speaks with the agent and with ranks of the real client."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.integration.agents import StartAgent

from allreduced.client import AsyncCommunicator
from allreduced.core.errors import LimitExceeded, to_wire
from allreduced.protocol.local import Refused, encode

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


node = pytest.mark.skipif(not CLIENTS["node"][0], reason="node is not installed")

TELLS = """
import fs from "node:fs";
import net from "node:net";
const connect = net.connect, begin = Date.now();
let ahead = 0;
Date.now = () => begin + ahead;
net.connect = (...arguments_) => {
  const socket = connect(...arguments_);
  socket.once("error", (error) => { fs.writeSync(1, `${error.code}\\n`); ahead += AHEAD; });
  return socket;
};
"""
"""What is loaded before the client: tells each failure to connect, and time is AHEAD milliseconds for each."""


@asynccontextmanager
async def at_a_full_queue(folder: Path, ahead: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, socket.socket]]:
    """Give a client in JavaScript that cannot connect yet, and the socket whose queue one other has filled."""
    tells, path = folder / "tells.mjs", str(folder / "agent.sock")
    tells.write_text(TELLS.replace("AHEAD", str(ahead)))
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        listener.setblocking(False)
        first.connect(path)
        executable, client = CLIENTS["node"]
        process = await asyncio.create_subprocess_exec(
            *(executable, "--import", str(tells), client, path, "job", "0", "1"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(BOUND):
                yield process, listener
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@node
async def test_javascript_connects_again_where_the_queue_of_the_agent_is_full(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with at_a_full_queue(tmp_path, 0) as (process, listener):
        assert process.stdout is not None
        for _ in range(3):
            assert await process.stdout.readline() == b"EAGAIN\n"
        first, _ = await loop.sock_accept(listener)
        first.close()
        connection, _ = await loop.sock_accept(listener)
        with connection:
            connection.setblocking(False)
            assert await loop.sock_recv(connection, 4096)  # its hello
            await loop.sock_sendall(connection, encode(Refused(to_wire(LimitExceeded("this is the agent")))))
            _, err = await process.communicate()
    assert process.returncode == 1
    assert b"Error: this is the agent" in err


@node
async def test_javascript_gives_up_after_thirty_seconds(tmp_path: Path) -> None:
    async with at_a_full_queue(tmp_path, 29_000) as (process, _):
        out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"EAGAIN\nEAGAIN\n")
    assert b"EAGAIN" in err
