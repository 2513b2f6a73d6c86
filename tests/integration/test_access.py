"""Strangers, other users and floods, with real agents: they are told off or dropped, and a job computes on."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.integration.agents import AgentProcess, NotStarted, StartAgent
from tests.support.local_plane import RawClient, submit
from tests.support.other_user import STRANGER, as_user, only_root

from allreduced.client import AsyncCommunicator, connect
from allreduced.core.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    LimitExceeded,
    from_wire,
)
from allreduced.protocol import local

LOOPBACK = ("--listen", "tcp://127.0.0.1:0")
BOUND = 100.0


def two_agents(start_agent: StartAgent, **environment: str) -> list[AgentProcess]:
    first = start_agent("a", *LOOPBACK, **environment)
    return [first, start_agent("b", *LOOPBACK, "--join", first.listen.removeprefix("tcp://"), **environment)]


async def rank_of(agent: AgentProcess, rank: int, size: int, secret: str | None = None) -> AsyncCommunicator:
    return await AsyncCommunicator.connect(
        job="job",
        rank=rank,
        size=size,
        local_rank=0,
        local_size=1,
        socket=agent.socket,
        deadline=BOUND,
        job_secret=secret,
    )


@contextlib.asynccontextmanager
async def job(agents: Sequence[AgentProcess]) -> AsyncIterator[list[AsyncCommunicator]]:
    size = len(agents)
    ranks = await asyncio.gather(*(rank_of(agent, rank, size) for rank, agent in enumerate(agents)))
    try:
        yield ranks
    finally:
        await asyncio.gather(*(rank.close() for rank in ranks))


async def computes(ranks: Sequence[AsyncCommunicator], start: int = 0) -> None:
    for count in (3, 50_000):
        results = await asyncio.gather(
            *(rank.all_reduce(np.full(count, start + number)) for number, rank in enumerate(ranks))
        )
        assert [result.tolist() for result in results] == [[sum(range(start, start + len(ranks)))] * count] * len(ranks)


async def stranger(agent: AgentProcess) -> RawClient:
    with as_user(STRANGER):
        client = RawClient.connect(agent.socket.replace("@", "\0", 1))
    await client.hello()
    return client


@only_root
async def test_one_user_cannot_join_read_end_or_look_into_the_group_of_another(start_agent: StartAgent) -> None:
    agents = two_agents(start_agent, ALLREDUCED_ACCESS_USERS="*")
    async with job(agents) as ranks:
        view, _ = await asyncio.gather(*(rank.all_reduce(np.arange(5000.0), view=True) for rank in ranks))
        mine = view.copy()
        client = await stranger(agents[0])
        try:
            await client.send(local.Join(1, "job", "world", 1, 2, 0, 0.5, 0.0))  # the rank of another user's process
            error = from_wire((await client.receive(local.RequestFailed)).error)
            assert isinstance(error, DeadlineExceeded)
            assert error.missing == (0,)
            await client.send(local.Join(2, "job", "world", 0, 1, 0, 30.0, 0.0))
            joined = await client.receive(local.Joined)
            handle = ranks_group(ranks[0])
            assert joined.group != handle
            await client.send(submit(3, group=handle, payload=bytes(16)))
            error = from_wire((await client.receive(local.RequestFailed)).error)
            assert isinstance(error, InvalidArgument)
            assert "holds no rank" in error.message
            await client.send(local.Leave(handle), local.ReleaseLeases(tuple(range(5000))))
            await client.send(*(local.ReleaseArena(arena) for arena in range(64)))
            for arena in range(8):
                await client.send(submit(10 + arena, group=joined.group, name=str(arena), arena=arena))
                error = from_wire((await client.receive(local.RequestFailed)).error)
                assert isinstance(error, InvalidArgument)
                assert "is not one of this client's" in error.message
            await client.send(local.AskStatus(99, True))
            reports = [(await client.receive(local.AgentStatus)).report for _ in agents]
            assert [[group.key.uid for group in report.groups] for report in reports] == [[STRANGER], []]
            assert [report.hidden[0].uid for report in reports] == [0, 0]
        finally:
            client.close()
        assert (view == mine).all()
        await computes(ranks)


def ranks_group(comm: AsyncCommunicator) -> int:
    joined = comm._session._conversation.joined
    assert joined is not None
    return joined.group


@only_root
async def test_a_user_that_may_not_attach_is_told_who_it_is_and_what_is_allowed(start_agent: StartAgent) -> None:
    agent = start_agent("a", ALLREDUCED_ACCESS_USERS="4322", ALLREDUCED_ACCESS_GROUPS="4444")
    async with job([agent]) as ranks:
        with pytest.raises(AuthenticationError) as caught, as_user(STRANGER):
            connect(job="job", rank=0, size=1, socket=agent.socket, deadline=BOUND)
        assert f"uid {STRANGER} " in caught.value.message
        assert "may not attach to this agent, which runs as uid 0" in caught.value.message
        assert "access.users allows 4322, access.groups allows 4444" in caught.value.message
        await computes(ranks)


async def test_a_rank_with_another_job_secret_is_refused_and_the_job_forms(start_agent: StartAgent) -> None:
    agents = two_agents(start_agent, ALLREDUCED_FAILURE_FAILURE_TIMEOUT="3", ALLREDUCED_ACCESS_JOB_SECRETS="required")
    with pytest.raises(AuthenticationError, match=r"access\.job_secrets is 'required'"):
        await rank_of(agents[0], 0, 3)
    first = [asyncio.ensure_future(rank_of(agents[0], rank, 3, "right")) for rank in (0, 2)]
    with pytest.raises(AuthenticationError, match=r"rank 1 of group 'world' of job 'job' gave another job secret"):
        await rank_of(agents[1], 1, 3, "wrong")
    ranks = [await rank_of(agents[1], 1, 3, "right"), *await asyncio.gather(*first)]
    await computes(ranks)
    await asyncio.gather(*(rank.close() for rank in ranks))
    for agent in agents:
        assert "right" not in agent.logged()


async def test_the_job_secret_can_come_from_the_environment(
    start_agent: StartAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = start_agent("a")
    monkeypatch.setenv("ALLREDUCED_JOB_SECRET", "right")
    ranks = await asyncio.gather(rank_of(agent, 0, 2), rank_of(agent, 1, 2, "right"))
    await computes(ranks)
    await asyncio.gather(*(rank.close() for rank in ranks))


# Floods

EACH = 100


class Flood:
    """Connections that send nothing, and connections that send garbage, to a socket and to a port."""

    def __init__(self, agent: AgentProcess) -> None:
        host, _, port = agent.listen.removeprefix("tcp://").rpartition(":")
        self._doors: list[tuple[socket.AddressFamily, str | tuple[str, int]]] = [
            (socket.AF_UNIX, agent.socket.replace("@", "\0", 1)),
            (socket.AF_INET, (host, int(port))),
        ]
        self._rng = random.Random(1)
        self._held: list[socket.socket] = []

    async def wave(self) -> None:
        """Open all of them anew."""
        self.close()
        for at in range(EACH):
            for family, address in self._doors:
                for garbage in (False, True):
                    sock = socket.socket(family, socket.SOCK_STREAM)
                    self._held.append(sock)
                    sock.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        sock.connect(address)
                    if garbage:
                        with contextlib.suppress(OSError):
                            sock.send(self._rng.randbytes(1 + at))
            await asyncio.sleep(0)

    def close(self) -> None:
        for sock in self._held:
            sock.close()
        self._held.clear()


async def test_floods_of_connections_do_not_keep_a_job_or_new_clients_out(start_agent: StartAgent) -> None:
    agents = two_agents(start_agent, ALLREDUCED_SECRET="shared", ALLREDUCED_LIMITS_CLIENTS="64")
    flood = Flood(agents[0])
    async with job(agents) as ranks:
        try:
            for wave in range(3):
                await flood.wave()
                await computes(ranks, wave)
                late = await AsyncCommunicator.connect(
                    job=f"late{wave}", rank=0, size=1, socket=agents[0].socket, deadline=BOUND
                )
                await computes([late])
                await late.close()
        finally:
            flood.close()
        await computes(ranks)
    assert agents[0].says("dropped")
    lines = agents[0].logged().splitlines()
    assert len(lines) < EACH  # many of one kind are told once


# The socket


def on_path(start_agent: StartAgent, path: Path) -> AgentProcess:
    return start_agent("a", "--socket", str(path))


async def test_a_regular_file_in_the_place_of_the_socket_is_left_alone(start_agent: StartAgent, tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    path.write_text("precious")
    with pytest.raises(NotStarted) as caught:
        on_path(start_agent, path)
    assert isinstance(caught.value.error, ConfigError)
    assert f"{path} exists and is not a socket" in caught.value.error.message
    assert caught.value.status != 0
    assert path.read_text() == "precious"


async def test_the_socket_of_a_killed_agent_is_taken_over_and_that_of_a_live_one_is_not(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    path = tmp_path / "agent.sock"
    killed = on_path(start_agent, path)
    killed.kill()
    assert path.is_socket()
    agent = on_path(start_agent, path)
    async with job([agent]) as ranks:
        with pytest.raises(NotStarted) as caught:
            on_path(start_agent, path)
        assert isinstance(caught.value.error, ConfigError)
        assert f"an agent answers at {path} already" in caught.value.error.message
        await computes(ranks)
    assert agent.stop() == 0
    assert not path.exists()


# What one user takes


@only_root
async def test_small_calls_of_one_user_leave_room_for_those_of_another(start_agent: StartAgent) -> None:
    agents = two_agents(start_agent, ALLREDUCED_ACCESS_USERS="*", ALLREDUCED_LIMITS_INLINE_BYTES="4MiB")
    slots = (4 << 20) // (8 << 10)
    async with job(agents) as ranks:
        both = [await stranger(agents[0]) for _ in range(2)]
        try:
            for rank, client in enumerate(both):
                await client.send(local.Join(1, "job", "world", rank, 2, rank, 30.0, 0.0))
            first, _ = [await client.receive(local.Joined) for client in both]
            one = {"count": 1, "shape": "(1,)", "payload": bytes(4)}
            await both[0].send(*(submit(2 + n, group=first.group, name=f"n{n}", **one) for n in range(slots)))
            refused = await both[0].receive(local.RequestFailed)
            error = from_wire(refused.error)
            assert isinstance(error, LimitExceeded)
            assert error.limit == "limits.inline_bytes"
            assert refused.request - 2 == slots * 3 // 4
            await computes(ranks)
        finally:
            for client in both:
                client.close()
        await computes(ranks)


@only_root
async def test_the_end_of_many_groups_of_one_user_disturbs_no_other(start_agent: StartAgent) -> None:
    agents = two_agents(start_agent, ALLREDUCED_ACCESS_USERS="*", ALLREDUCED_FAILURE_FAILURE_TIMEOUT="1")
    async with job(agents) as ranks:
        clients = []
        for number in range(3):
            client = await stranger(agents[0])
            clients.append(client)
            for group in range(257):
                await client.send(local.Join(1 + group, f"job {number}", f"group {group}", 0, 1, 0, 30.0, 0.0))
                if group < 256:
                    await client.receive(local.Joined)
            error = from_wire((await client.receive(local.RequestFailed)).error)
            assert isinstance(error, LimitExceeded)
            assert error.limit == "limits.groups"
        await computes(ranks)
        for client in clients:
            client.close()
        for start in range(10):
            await computes(ranks, start)
    assert "event=peer_lost" not in agents[0].logged() + agents[1].logged()
