"""What clients do wrong: it costs them their connection, one log line, and nobody else anything."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.local_plane import GROUP, INCARNATION, NOBODY, NODE, Plane, open_plane, submit
from tests.support.other_user import STRANGER, as_user, only_root

from allreduced.core.errors import (
    AuthenticationError,
    LimitExceeded,
    PeerLost,
    ProtocolError,
    from_wire,
)
from allreduced.core.identity import Member
from allreduced.core.refusals import REFUSED, Kind
from allreduced.core.refusals import Plane as Side
from allreduced.daemon import client_connection
from allreduced.daemon.access import Access
from allreduced.daemon.arena_table import ArenaLimits
from allreduced.daemon.engine.events import ClientGone as EngineClientGone
from allreduced.daemon.engine.events import GroupStarted, LeasesReturned, Submitted
from allreduced.daemon.engine.region import FIRST_ENGINE_BUFFER as RESULT
from allreduced.daemon.local_limits import LocalLimits
from allreduced.daemon.membership.events import ClientGone, ClientJoining, ClientLeaving
from allreduced.protocol import local
from allreduced.protocol.job_secret import digest_of

FOUR = bytes(16)
HELLO = local.Hello(1, 1, 1, True)


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    async with open_plane() as plane:
        yield plane


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(64),
        b"\xff" * 64,
        framed(b"\xc1"),
        framed(b"\x91\x63"),
        framed(b"\xdd\xff\xff\xff\xff"),
        (local.MAX_MESSAGE + 1).to_bytes(4, "little"),
        local.encode(local.Leave(1)),
        local.encode(local.Welcome(1, "n", 1, 1, 300.0)),
        local.encode(local.Hello(7, 9, 1, True)),
        local.encode(HELLO) + local.encode(HELLO),
        local.encode(HELLO) + framed(b"\x93\x05\x01\x02"),
        local.encode(HELLO) + local.encode(local.Welcome(1, "n", 1, 1, 300.0)),
    ],
)
async def test_what_is_no_protocol_ends_the_connection(
    plane: Plane, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    bystander, _ = await plane.join()
    client = plane.connect()
    await client.send_bytes(data)
    *before, refused = await client.rest()
    assert all(isinstance(message, local.Welcome) for message in before)
    assert isinstance(refused, local.Refused)
    assert isinstance(from_wire(refused.error), ProtocolError)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    await bystander.send(submit(2, payload=FOUR))
    assert (await plane.sink.told(Submitted)).request == 2
    assert plane.server.clients == 1


async def test_the_versions_are_told_to_who_speaks_others(plane: Plane) -> None:
    client = plane.connect()
    await client.send(local.Hello(7, 9, 1, True))
    [refused] = await client.rest()
    assert isinstance(refused, local.Refused)
    assert "versions 7 to 9" in refused.error[1]
    assert "same version" in refused.error[2]


async def test_a_request_number_in_flight_cannot_be_used_again(plane: Plane) -> None:
    client, number = await plane.join()
    await client.send(submit(2, payload=FOUR), submit(2, payload=FOUR))
    [refused] = await client.rest()
    assert isinstance(refused, local.Refused)
    assert "request 2 is in flight already" in refused.error[1]
    assert EngineClientGone(number) in plane.sink.engine
    plane.deliver(number, 2, FOUR)  # nobody is there; its slot is free now


@pytest.mark.parametrize("pieces", [[20], [16, 1], [8, 9]])
async def test_more_input_than_announced_ends_the_connection(plane: Plane, pieces: list[int]) -> None:
    client, _ = await plane.join()
    await client.send(submit(2, upload=True), *(local.Upload(2, bytes(length)) for length in pieces))
    [refused] = await client.rest()
    assert isinstance(refused, local.Refused)


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 20])
async def test_a_client_that_ends_in_a_message_is_gone(
    plane: Plane, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    client, number = await plane.join()
    await client.send_bytes(local.encode(submit(2, payload=FOUR))[:cut])
    client.close()
    await plane.sink.until(lambda: EngineClientGone(number) in plane.sink.engine)
    assert plane.sink.membership[-1] == ClientGone(number, "before its first call")
    assert "middle of a message" in caplog.text


async def test_a_message_that_never_ends_is_held_in_bounds_and_hurts_nobody(plane: Plane) -> None:
    endless, bystander = await plane.attach(), plane.connect()
    await endless.send_bytes(local.MAX_MESSAGE.to_bytes(4, "little") + bytes(1 << 20))
    await bystander.hello()
    endless.close()


async def test_a_killed_client_is_gone_and_its_arena_with_it(plane: Plane) -> None:
    script = """
import os, socket, sys
sys.path[:0] = sys.argv[2].split(os.pathsep)
from allreduced.protocol import local
s = socket.socket(socket.AF_UNIX); s.connect("\\0" + sys.argv[1])
s.sendall(local.encode(local.Hello(1, 1, os.getpid(), True)) + local.encode(local.AllocateArena(1, 1 << 20)))
s.recv(1 << 16); s.sendall(b"\\xff")
print("up", flush=True); sys.stdin.read()
"""
    before = plane.arenas.total_bytes
    paths = os.pathsep.join(path for path in sys.path if path)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, plane.name[1:], paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    await plane.sink.until(lambda: plane.arenas.total_bytes > before)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await plane.sink.told(ClientGone)
    assert plane.arenas.total_bytes == before
    assert process.stdin is not None
    process.stdin.close()
    await process.communicate()


@pytest.mark.parametrize("limits", [LocalLimits(outgoing_bytes=1 << 20), LocalLimits(outgoing_messages=100)])
async def test_a_client_that_does_not_read_is_dropped(limits: LocalLimits, caplog: pytest.LogCaptureFixture) -> None:
    async with open_plane(limits=limits) as plane:
        client, number = await plane.join()
        many = range(2, 1002)
        for request in many:
            await client.send(submit(request, payload=FOUR))
        await plane.sink.told(Submitted, len(many))
        for request in many:
            plane.deliver(number, request, bytes(8192))
        await plane.sink.told(ClientGone)
        assert caplog.text.count("does not read") == 1
        assert plane.server.clients == 0


async def test_pieces_of_a_result_wait_until_the_client_reads() -> None:
    async with open_plane(limits=LocalLimits(inline=16)) as plane:
        client, number = await plane.join()
        await client.send(submit(2, payload=FOUR))
        await plane.sink.told(Submitted)
        plane.deliver(number, 2, bytes(8192))
        assert (await client.receive(local.Done)).pieces
        assert len((await client.receive(local.Download)).data) == 8192


async def test_descriptors_wait_their_turn_and_stay_what_they_were(plane: Plane) -> None:
    client, number = await plane.join()
    await plane.result_arena(RESULT, 4096)
    many = 200
    await client.send(*(submit(request, payload=FOUR) for request in range(2, 2 + many)))
    await plane.sink.told(Submitted, many)
    for request in range(2, 1 + many):
        plane.deliver(number, request, bytes(8192))
    plane.deliver(number, 1 + many, None, arena=RESULT, lease=1)  # behind what fills the socket
    plane.server.arena_gone(RESULT)
    plane.arenas.drop(RESULT)
    for _ in range(many - 1):
        await client.receive(local.Done)
    await client.receive(local.ResultArena)
    await client.receive(local.Done)
    await client.receive(local.ResultArenaGone)
    [descriptor] = client.descriptors
    assert os.fstat(descriptor).st_size == 4096


async def test_a_client_that_leaves_while_it_is_written_to_has_left(plane: Plane) -> None:
    client, number = await plane.join()
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client.sock, local.encode(local.Leave(GROUP)))
    client.close()
    plane.server.group_ended([number], GROUP, LimitExceeded("any"))  # cannot be sent any more
    await plane.sink.told(ClientGone)
    assert [type(event) for event in plane.sink.membership[1:]] == [ClientGone]  # it was ended here first


async def test_messages_before_the_end_count_although_answers_cannot_be_sent(plane: Plane) -> None:
    client, number = await plane.join()
    await client.send(submit(2, payload=FOUR))
    await plane.sink.told(Submitted)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client.sock, local.encode(local.Leave(GROUP)))
    client.close()
    plane.deliver(number, 2, FOUR)  # the socket is closed at the other end
    await plane.sink.told(ClientGone)
    assert plane.sink.membership[1:] == [ClientLeaving(number, GROUP), ClientGone(number)]


async def test_another_user_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with open_plane(access=NOBODY) as plane:
        client = plane.connect()
        [refused] = await client.rest()
        assert isinstance(refused, local.Refused)
        assert isinstance(from_wire(refused.error), AuthenticationError)
        assert "may not attach" in caplog.text


async def test_clients_are_limited() -> None:
    async with open_plane(limits=LocalLimits(clients=1)) as plane:
        first = await plane.attach()
        [refused] = await plane.connect().rest()
        assert isinstance(refused, local.Refused)
        error = from_wire(refused.error)
        assert isinstance(error, LimitExceeded)
        assert error.limit == "limits.clients"
        await first.send(local.AllocateArena(2, 1))
        await first.receive(local.ArenaGranted)


async def test_who_says_no_hello_is_dropped() -> None:
    async with open_plane(limits=LocalLimits(hello_timeout=0.02)) as plane:
        client = plane.connect()
        await client.send_bytes(local.encode(HELLO)[:5])
        [refused] = await client.rest()
        assert isinstance(refused, local.Refused)
        error = from_wire(refused.error)
        assert isinstance(error, LimitExceeded)
        assert error.limit == "limits.hello_timeout"
        assert "0.02 s" in error.message


async def test_a_flood_of_messages_is_handled_in_turns_with_others(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "TURN_SECONDS", -1.0)  # one message a turn
    many = 2000
    flood, other = await plane.attach(), await plane.attach()
    await flood.send_bytes(b"".join(local.encode(local.ReleaseLeases((number,))) for number in range(many)))
    await other.send(local.AllocateArena(1, 4096))
    await other.receive(local.ArenaGranted)
    assert len(plane.sink.engine) < many
    await plane.sink.told(LeasesReturned, many)
    assert [event.leases for event in plane.sink.engine if isinstance(event, LeasesReturned)] == [
        (number,) for number in range(many)
    ]
    await flood.send(local.AllocateArena(1, 4096))  # and it is read on
    await flood.receive(local.ArenaGranted)


async def test_what_waits_of_a_flood_is_handled_before_its_end(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_connection, "TURN_SECONDS", -1.0)
    flood = await plane.attach()
    await flood.send_bytes(b"".join(local.encode(local.ReleaseLeases((number,))) for number in range(500)))
    flood.close()
    await plane.sink.told(ClientGone)
    assert len([event for event in plane.sink.engine if isinstance(event, LeasesReturned)]) == 500


async def test_clients_of_one_user_are_limited() -> None:
    async with open_plane(limits=LocalLimits(clients_per_user=2)) as plane:
        await plane.attach()
        second = await plane.attach()
        [refused] = await plane.connect().rest()
        assert isinstance(refused, local.Refused)
        error = from_wire(refused.error)
        assert isinstance(error, LimitExceeded)
        assert error.limit == "limits.clients_per_user"
        assert f"2 clients of uid {os.geteuid()}" in error.message
        second.close()
        await plane.until_clients(1)
        await plane.attach()


async def test_who_says_nothing_makes_room_for_who_does() -> None:
    async with open_plane(limits=LocalLimits(clients=3)) as plane:
        client = await plane.attach()
        silent = [plane.connect() for _ in range(2)]
        await plane.until_clients(3)
        others = [await plane.attach(), await plane.attach()]
        for stranger in silent:
            [refused] = await stranger.rest()
            assert isinstance(refused, local.Refused)
            assert from_wire(refused.error).limit == "limits.clients"  # type: ignore[attr-defined]
        for who in (client, *others):
            await who.send(local.AllocateArena(2, 1))
            await who.receive(local.ArenaGranted)


@only_root
async def test_a_user_with_too_many_clients_ends_no_stranger_of_another() -> None:
    async with open_plane(limits=LocalLimits(clients_per_user=1), access=Access(0, everybody=True)) as plane:
        await plane.attach()
        with as_user(STRANGER):
            other = plane.connect()
        await plane.until_clients(2)
        [refused] = await plane.connect().rest()
        assert isinstance(refused, local.Refused)
        assert from_wire(refused.error).limit == "limits.clients_per_user"  # type: ignore[attr-defined]
        await other.hello()


async def test_requests_of_one_user_are_limited_over_its_clients() -> None:
    async with open_plane(limits=LocalLimits(requests_per_user=3)) as plane:
        first, number = await plane.join()
        second, _ = await plane.join()
        await first.send(submit(2, payload=FOUR), submit(3, payload=FOUR))
        await second.send(submit(2, payload=FOUR), submit(3, payload=FOUR))
        failed = await second.receive(local.RequestFailed)
        error = from_wire(failed.error)
        assert isinstance(error, LimitExceeded)
        assert error.limit == "limits.requests_per_user"
        assert f"3 requests of the processes of uid {os.geteuid()}" in error.message
        await plane.sink.told(Submitted, 3)
        plane.deliver(number, 2, FOUR)
        await second.send(submit(4, payload=FOUR))
        await plane.sink.told(Submitted, 4)


@pytest.mark.parametrize(("limit", "whose"), [("groups", "this process"), ("groups_per_user", "the processes of uid")])
async def test_groups_are_limited_and_their_end_makes_room(limit: str, whose: str) -> None:
    async with open_plane(limits=LocalLimits(**{limit: 3})) as plane:
        client, number_of = await plane.attach(), 0
        ends = {2: "leaves", 3: "is ended", 4: "is not admitted"}
        for request in ends:
            await client.send(local.Join(request, f"job {request}", "world", 0, 1, 0, 60.0, 60.0))
            joining = await plane.sink.told(ClientJoining, request - 1)
            number_of = joining.client
            if ends[request] != "is not admitted":
                started = GroupStarted(
                    request, joining.key, 1, 1 << 20, (Member(NODE, INCARNATION, (0,)),), 0, {0: joining.client}
                )
                plane.server.admitted(joining.client, request, 0, started)
                await client.receive(local.Joined)

        await client.send(local.Join(5, "one more", "world", 0, 1, 0, 60.0, 60.0))
        error = from_wire((await client.receive(local.RequestFailed)).error)
        assert isinstance(error, LimitExceeded)
        assert error.limit == f"limits.{limit}"
        assert f"3 groups have ranks of {whose}" in error.message
        # Each way in which one ends makes room for one, and no more.
        count = 3
        for request, (number, end) in enumerate(ends.items(), 10):
            if end == "leaves":
                await client.send(local.Leave(number))
            elif end == "is ended":
                plane.server.group_ended([number_of], number, PeerLost("gone"))
                await client.receive(local.GroupEnded)
            else:
                plane.server.failed(number_of, number, PeerLost("gone"))
                await client.receive(local.RequestFailed)
            await client.send(local.Join(request, f"later {request}", "world", 0, 1, 0, 60.0, 60.0))
            count += 1
            await plane.sink.told(ClientJoining, count)
            await client.send(local.Join(100 + request, "one more", "world", 0, 1, 0, 60.0, 60.0))
            assert (await client.receive(local.RequestFailed)).request == 100 + request
        # So does the end of a client that holds some, and waits for some.
        client.close()
        await plane.until_clients(0)
        other = await plane.attach()
        for request in range(2, 5):
            await other.send(local.Join(request, f"job {request}", "other", 0, 1, 0, 60.0, 60.0))
        await plane.sink.told(ClientJoining, count + 3)
        await other.send(local.Join(5, "one more", "world", 0, 1, 0, 60.0, 60.0))
        assert (await other.receive(local.RequestFailed)).request == 5


async def test_requests_of_a_client_that_ends_while_it_joins_count_no_more() -> None:
    async with open_plane(limits=LocalLimits(requests_per_user=2)) as plane:
        kept = await plane.attach()
        for number in range(1, 4):
            client = await plane.attach()
            await client.send(local.Join(2, f"job {number}", "world", 0, 2, 0, 60.0, 60.0))
            await plane.sink.told(ClientJoining, number)
            client.close()
            await plane.until_clients(1)
        await kept.send(local.Join(2, "job", "world", 0, 2, 0, 60.0, 60.0))
        await plane.sink.told(ClientJoining, 4)


async def test_tensors_in_pieces_are_limited() -> None:
    async with open_plane(limits=LocalLimits(streams=2, inline=64)) as plane:
        client, number = await plane.join()
        big = {"count": 32, "shape": "(32,)"}
        await client.send(
            submit(2, upload=True, **big),
            submit(3, payload=FOUR, inline_result=True),
            submit(4, upload=True, **big),
            submit(5, upload=True, **big),
        )
        failed = await client.receive(local.RequestFailed)
        assert failed.request == 5
        error = from_wire(failed.error)
        assert isinstance(error, LimitExceeded)
        assert error.limit == "limits.streams"
        assert "2 large tensors" in error.message
        await client.send(local.Upload(2, bytes(128)))
        await plane.sink.told(Submitted, 2)
        plane.deliver(number, 2, FOUR)
        await client.receive(local.Done)
        await client.send(submit(6, upload=True, **big), local.Upload(6, bytes(128)))
        await plane.sink.told(Submitted, 3)


def denied(what: str, reason: str) -> str:
    """Return the line about a join or an arena of this process that was refused."""
    where = "job=job group=world " if what == "join" else ""
    return f"event={what}_refused {where}uid={os.geteuid()} pid={os.getpid()} reason={reason!r}"


async def test_memory_of_one_user_is_limited_over_its_clients(caplog: pytest.LogCaptureFixture) -> None:
    before = REFUSED[Side.CLIENTS, Kind.LIMIT]
    caplog.set_level(logging.INFO)
    limits = ArenaLimits(64 << 20, 48 << 20, 48 << 20, per_user=1 << 20)
    async with open_plane(arenas=limits) as plane:
        first, second = await plane.attach(), await plane.attach()
        await first.send(local.AllocateArena(2, 600 << 10))
        granted = await first.receive(local.ArenaGranted)
        await second.send(local.AllocateArena(2, 600 << 10))
        error = from_wire((await second.receive(local.RequestFailed)).error)
        assert isinstance(error, LimitExceeded)
        assert error.limit == "limits.arena_bytes_per_user"
        assert str(1 << 20) in error.message
        assert denied("arena", error.message) in caplog.messages
        assert REFUSED[Side.CLIENTS, Kind.LIMIT] == before  # it may ask for less
        await first.send(local.ReleaseArena(granted.arena), local.AllocateArena(3, 1))
        await first.receive(local.ArenaGranted)
        await second.send(local.AllocateArena(3, 600 << 10))
        await second.receive(local.ArenaGranted)


async def test_a_join_beyond_the_requests_of_a_user_is_told_to_those_who_run_the_agent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = REFUSED[Side.CLIENTS, Kind.LIMIT]
    async with open_plane(limits=LocalLimits(requests_per_user=1)) as plane:
        client, other = await plane.attach(), await plane.attach()
        await client.send(local.Join(2, "job", "world", 0, 2, 0, 60.0, 60.0))
        await plane.sink.told(ClientJoining, 1)
        await other.send(local.Join(2, "job", "world", 1, 2, 1, 60.0, 60.0))
        error = from_wire((await other.receive(local.RequestFailed)).error)
        assert isinstance(error, LimitExceeded)
        assert error.limit == "limits.requests_per_user"
        assert caplog.messages == [denied("join", error.message)]
        assert REFUSED[Side.CLIENTS, Kind.LIMIT] == before + 1


async def test_a_join_that_makes_no_sense_is_a_matter_of_its_process_alone(caplog: pytest.LogCaptureFixture) -> None:
    before = REFUSED.copy()
    async with open_plane() as plane:
        client = await plane.attach()
        await client.send(local.Join(2, "job", "world", 2, 2, 0, 60.0, 60.0))
        error = from_wire((await client.receive(local.RequestFailed)).error)
        assert "rank 2 is outside a group of 2" in error.message
    assert caplog.messages == []
    assert before == REFUSED


async def test_a_rank_without_a_job_secret_is_told_to_those_who_run_the_agent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = REFUSED[Side.CLIENTS, Kind.SECRET]
    async with open_plane(job_secrets=True) as plane:
        client = await plane.attach()
        await client.send(local.Join(2, "job", "world", 1, 2, 0, 60.0, 60.0))
        error = from_wire((await client.receive(local.RequestFailed)).error)
        assert isinstance(error, AuthenticationError)
        assert caplog.messages == [denied("join", error.message)]
        assert "rank 1 of group 'world' of job 'job' gave none" in error.message
        await client.send(local.Join(3, "job", "world", 1, 2, 0, 60.0, 60.0, digest_of(b"of the job", "job", "world")))
        joining = await plane.sink.told(ClientJoining, 1)
        wrong = AuthenticationError("rank 1 of group 'world' of job 'job' gave another job secret than rank 0")
        plane.server.failed(joining.client, 3, wrong)
        assert from_wire((await client.receive(local.RequestFailed)).error).message == wrong.message
        assert caplog.messages[1:] == [denied("join", wrong.message)]
        assert REFUSED[Side.CLIENTS, Kind.SECRET] == before + 2


async def test_close_sends_what_waits_and_removes_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "allreduced" / "agent.sock"
    async with open_plane(name=str(path)) as plane:
        client, number = await plane.join()
        assert path.is_socket()
        assert path.stat().st_mode & 0o777 == 0o600
        many = 100
        await client.send(*(submit(request, payload=FOUR) for request in range(2, 2 + many)))
        await plane.sink.told(Submitted, many)
        for request in range(2, 2 + many):
            plane.deliver(number, request, bytes(8192))
        closing = asyncio.create_task(plane.server.close(10))
        assert len(await client.rest()) == many
        await closing
        assert not path.exists()
        assert number in plane.sink.gone
