"""What an agent may never send: each ends the connection with an error that says what it was."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from allreduced.client import (
    AgentUnavailable,
    AsyncCommunicator,
    ProtocolError,
    WaitTimeout,
    connect,
)
from allreduced.protocol.local import (
    AllocateArena,
    ArenaGranted,
    Done,
    Join,
    Joined,
    Leave,
    ResultArena,
    Submit,
    ToAgent,
    encode,
)

if TYPE_CHECKING:
    from tests.unit.client.conftest import Client, FakeAgent, MakeAgent

LARGE = 100_000
"""Elements that do not fit inside a message."""


GARBAGE = {
    "no msgpack": b"\x04\0\0\0\xff\xff\xff\xff",
    "no length": b"\0\0\0\0",
    "huge": b"\xff\xff\xff\xff",
    "to the other side": encode(Leave(7)),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_ends_the_connection(make_agent: MakeAgent, data: bytes) -> None:
    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        if isinstance(message, Submit):
            client.send_bytes(data)
            return True
        return False

    comm = connect(socket=make_agent(script).socket, job="j", rank=0, size=1)
    with pytest.raises(ProtocolError):
        comm.all_reduce(np.ones(3))
    with pytest.raises(ProtocolError):
        comm.barrier()
    comm.close()


def _done(submit: Submit, **changes: object) -> Done:
    fields: dict[str, object] = {
        "request": submit.request,
        "payload": None,
        "arena": -1,
        "offset": 0,
        "nbytes": 0,
        "lease": 0,
        "pieces": False,
        "participants": (),
        "algorithm": "x",
        "elapsed": 0.0,
    }
    return Done(**{**fields, **changes})  # type: ignore[arg-type]  # the point is to try wrong combinations


@pytest.mark.parametrize(
    "changes",
    [
        {"request": 12345},
        {"payload": b"1234567"},
        {"arena": 3, "nbytes": 24, "lease": 1},
        {},
        {"pieces": True},
    ],
    ids=["unknown request", "short payload", "unknown arena", "no result", "pieces that never come right"],
)
def test_a_result_that_cannot_be_ends_the_connection(make_agent: MakeAgent, changes: dict[str, object]) -> None:
    from allreduced.protocol.local import Download

    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        if isinstance(message, Submit):
            client.send(_done(message, **changes))
            if changes.get("pieces"):
                client.send(Download(message.request, b"x" * 25, last=True))
            return True
        return False

    comm = connect(socket=make_agent(script).socket, job="j", rank=0, size=1)
    with pytest.raises(ProtocolError):
        comm.all_reduce(np.ones(3))
    comm.close()


def test_a_descriptor_that_is_too_short_is_refused(make_agent: MakeAgent) -> None:
    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        if isinstance(message, AllocateArena):
            descriptor = os.memfd_create("short")
            client.send(ArenaGranted(message.request, 5, message.nbytes), descriptor)
            os.close(descriptor)
            return True
        return False

    comm = connect(socket=make_agent(script).socket, job="j", rank=0, size=1)
    with pytest.raises(ProtocolError, match="its memory is shorter"):
        comm.empty(LARGE)
    comm.close()


def test_a_message_without_its_descriptor_is_refused(make_agent: MakeAgent) -> None:
    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        if isinstance(message, Submit):
            client.send(ResultArena(1, 7, 4096))
            return True
        return False

    comm = connect(socket=make_agent(script).socket, job="j", rank=0, size=1)
    with pytest.raises(ProtocolError, match="without its descriptor"):
        comm.all_reduce(np.ones(3))
    comm.close()


def test_an_agent_that_never_answers_does_not_hang_a_wait(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allreduced.client.session.GRACE_SECONDS", 0.0)
    agent = make_agent(lambda agent, client, message: isinstance(message, Submit))
    comm = connect(socket=agent.socket, job="j", rank=0, size=1)
    with pytest.raises(AgentUnavailable, match="did not answer"):
        comm.all_reduce(np.ones(3), deadline=0.02)
    comm.close()


def _undecided(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
    """Answer no submit, and tell that operations may end long after their deadline."""
    if isinstance(message, Join):
        client.send(Joined(message.request, 7, 1, 0, 1, 0, (("node-a", (0,)),), failure_timeout=1000.0))
        return True
    return isinstance(message, Submit)


def test_an_agent_that_waits_for_another_one_is_not_held_to_hang(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allreduced.client.session.GRACE_SECONDS", 0.0)
    with connect(socket=make_agent(_undecided).socket, job="j", rank=0, size=1) as comm:
        work = comm.all_reduce(np.ones(3), deadline=0.01, async_op=True)
        with pytest.raises(WaitTimeout):
            work.wait(timeout=0.1)


async def test_an_agent_that_waits_for_another_one_is_not_held_to_hang_in_asyncio(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allreduced.client.async_session.GRACE_SECONDS", 0.0)
    async with AsyncCommunicator.connect(socket=make_agent(_undecided).socket, job="j", rank=0, size=1) as comm:
        work = comm.all_reduce(np.ones(3), deadline=0.01)
        with pytest.raises(WaitTimeout):
            await work.wait(timeout=0.1)
