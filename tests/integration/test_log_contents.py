"""What is in tensors never gets into a log, at any level and in either format, however calls end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
from tests.integration.agents import AgentProcess, StartAgent
from tests.integration.test_agent import BOUND, group, three_agents
from tests.integration.test_links import until_logged
from tests.support.local_plane import RawClient, submit

from allreduced.client import AsyncCommunicator
from allreduced.core.errors import DeadlineExceeded, MismatchError, PeerLost
from allreduced.protocol.local import encode

MARK = b"weights nobody else may ever see"
TRACES = (
    MARK[:12].decode(),
    MARK[8:20].decode(),
    MARK[:8].hex(),
    str(list(MARK[:4]))[1:-1],
    base64.b64encode(MARK)[:12].decode(),
    # As float32, which is how they would be shown after a reduction.
    *(f"{value:.4g}" for value in np.frombuffer(MARK, "float32")[:2]),
)
"""How they could show."""


def marked(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(MARK * (nbytes // len(MARK) + 1), "uint8")[:nbytes]


@contextlib.asynccontextmanager
async def stranger(agent: AgentProcess) -> AsyncIterator[RawClient]:
    client = RawClient.connect(agent.socket.replace("@", "\0", 1))
    try:
        await client.hello()
        yield client
    finally:
        client.close()


async def wrong_payloads(agent: AgentProcess) -> int:
    """Send submits whose payload is of a wrong kind or place, or cut, each from a new client; return how many."""
    whole = encode(submit(3, payload=MARK))
    fields = msgpack.unpackb(whole[4:])
    at = next(at for at, value in enumerate(fields) if value == MARK)
    sent = []
    for place, value in ((at, MARK.decode()), (at, list(MARK)), (at, {"x": MARK}), (at - 1, MARK), (at + 1, MARK)):
        body = msgpack.packb([*fields[:place], value, *fields[place + 1 :]])
        sent.append(len(body).to_bytes(4, "little") + body)
    for data in (*sent, whole[:-10], whole + whole[4:]):
        async with stranger(agent) as client:
            with contextlib.suppress(ConnectionError):
                await client.send_bytes(data)
            with contextlib.suppress(OSError):
                client.sock.shutdown(1)
            await client.rest()
    return len(sent) + 2


async def calls_of_every_end(ranks: list[AsyncCommunicator]) -> None:
    """Let calls end well, by a mismatch, and by a rank that does not come."""
    for nbytes in (len(MARK), 50_000, 3_000_000):
        results = await asyncio.gather(*(rank.all_reduce(marked(nbytes), op="max", name="w") for rank in ranks))
        assert all(np.array_equal(result, marked(nbytes)) for result in results)
    for nbytes in (len(MARK), 50_000):
        failed = await asyncio.gather(
            *(rank.all_reduce(marked(nbytes + 4 * rank.rank).view("float32")) for rank in ranks), return_exceptions=True
        )
        assert [type(error) for error in failed] == [MismatchError] * len(ranks)
        with pytest.raises(DeadlineExceeded):
            await ranks[0].all_reduce(marked(nbytes).view("float32"), name="alone", deadline=0.2)


@pytest.mark.parametrize("style", ["text", "json"])
async def test_contents_of_tensors_are_in_no_log(start_agent: StartAgent, style: str) -> None:
    agents = three_agents(
        start_agent,
        ALLREDUCED_AGENT_LOG_LEVEL="debug",
        ALLREDUCED_AGENT_LOG_FORMAT=style,
        ALLREDUCED_FAILURE_FAILURE_TIMEOUT="2",
    )
    key, mark = ('"event": "', '"') if style == "json" else ("event=", " ")
    async with asyncio.timeout(BOUND), group(agents[:2], 2, "living") as living, group(agents, 3) as ranks:
        await calls_of_every_end(ranks)
        wrong = await wrong_payloads(agents[0])
        await until_logged(agents[0], f"{key}client_dropped{mark}", wrong)
        # An agent dies while others hold parts of an operation.
        waiting = [asyncio.ensure_future(rank.all_reduce(marked(3_000_000), op="max")) for rank in ranks[:2]]
        agents[2].kill()
        assert [type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == [PeerLost] * 2
        await calls_of_every_end(living)
    assert [agent.stop() for agent in agents[:2]] == [0, 0]
    for agent in agents:
        text = agent.logged()
        assert f"{key}ready{mark}" in text
        for trace in TRACES:
            assert trace not in text, (agent.node, trace)
    for event in ("operation_failed", "peer_lost"):
        assert f"{key}{event}{mark}" in agents[0].logged()
