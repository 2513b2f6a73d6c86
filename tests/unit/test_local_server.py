"""The local plane with real sockets: hello, ranks, arenas, operations, results."""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import struct
from collections.abc import AsyncIterator

import pytest
from tests.support.local_plane import GROUP, INCARNATION, NODE, Plane, open_plane, submit

from allreduced.core.errors import (
    AgentUnavailable,
    InvalidArgument,
    LimitExceeded,
    PeerLost,
    RankClaimed,
    from_wire,
)
from allreduced.core.identity import GroupKey
from allreduced.daemon.arena_table import ArenaLimits
from allreduced.daemon.engine.events import LeasesReturned, Submitted
from allreduced.daemon.engine.region import FIRST_ENGINE_BUFFER as RESULT
from allreduced.daemon.engine.region import Region
from allreduced.daemon.local_limits import LocalLimits
from allreduced.daemon.membership.events import ClientGone, ClientJoining, ClientLeaving
from allreduced.protocol import local
from allreduced.protocol.peer import Fingerprint

FOUR = struct.pack("4f", 1, 2, 3, 4)


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    async with open_plane() as plane:
        yield plane


async def test_hello_is_answered_with_version_node_and_inline_limit(plane: Plane) -> None:
    client = plane.connect()
    await client.send(local.Hello(1, 9, os.getpid(), True))
    assert await client.receive(local.Welcome) == local.Welcome(local.HIGHEST_VERSION, NODE, INCARNATION, 8192, 300.0)


async def test_a_join_becomes_a_claim_of_the_peers_uid_and_is_answered(plane: Plane) -> None:
    client = await plane.attach()
    await client.send(local.Join(4, "job", "world", 1, 2, 1, 30.0, 60.0))
    joining = await plane.sink.told(ClientJoining)
    assert joining.key == GroupKey(os.geteuid(), "job", "world")
    assert (joining.request, joining.rank, joining.size, joining.local_rank) == (4, 1, 2, 1)
    assert joining.pid == os.getpid()
    assert 0 < joining.deadline_at - plane.sink.now() <= 30
    plane.server.failed(joining.client, 4, RankClaimed("taken", rank=1))
    failed = await client.receive(local.RequestFailed)
    assert failed.request == 4
    assert isinstance(from_wire(failed.error), RankClaimed)
    await client.send(local.Join(5, "job", "world", 2, 2, 1, 30.0, 60.0))
    failed = await client.receive(local.RequestFailed)
    assert "ranks are 0 to 1" in failed.error[1]


async def test_an_admitted_client_learns_who_is_where(plane: Plane) -> None:
    client, number = await plane.join(1)
    assert plane.server.is_connected(number)
    assert not plane.server.is_connected(number + 1)
    assert plane.server.clients == 1
    await client.send(local.Leave(GROUP), local.Leave(GROUP), local.Leave(3))
    assert await plane.sink.told(ClientLeaving) == ClientLeaving(number, GROUP)
    await client.send(submit(2, count=0))
    failed = await client.receive(local.RequestFailed)
    assert "holds no rank of group" in failed.error[1]
    assert sum(isinstance(event, ClientLeaving) for event in plane.sink.membership) == 1


@pytest.mark.parametrize(("of_call", "of_group", "holds"), [(7.0, 60.0, 7.0), (0.0, 60.0, 60.0), (0.0, 0.0, 300.0)])
async def test_the_deadline_is_that_of_the_call_else_of_the_group_else_of_the_agent(
    plane: Plane, of_call: float, of_group: float, holds: float
) -> None:
    client, _ = await plane.join(default_deadline=of_group)
    before = plane.sink.now()
    await client.send(submit(2, deadline=of_call, payload=FOUR))
    event = await plane.sink.told(Submitted)
    assert before + holds <= event.deadline_at <= plane.sink.now() + holds


async def test_an_input_arena_is_sealed_shared_and_charged(plane: Plane) -> None:
    client, number = await plane.join()
    before = plane.arenas.total_bytes
    await client.send(local.AllocateArena(2, 10000))
    granted = await client.receive(local.ArenaGranted)
    assert granted == local.ArenaGranted(2, granted.arena, 10000)
    [descriptor] = client.descriptors
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with mmap.mmap(descriptor, 10000) as theirs:
        theirs[96:112] = FOUR
        await client.send(submit(3, arena=granted.arena, offset=96))
        event = await plane.sink.told(Submitted)
        assert event.source == Region(granted.arena, 96, 16)
        assert plane.input(event) == FOUR
    await client.send(local.ReleaseArena(granted.arena), submit(4, arena=granted.arena, offset=96))
    failed = await client.receive(local.RequestFailed)
    assert "not one of this client's" in failed.error[1]
    assert plane.input(event) == FOUR  # the operation still reads it
    plane.deliver(number, 3, FOUR)
    assert (await client.receive(local.Done)).payload == FOUR
    assert plane.arenas.total_bytes == before
    with pytest.raises(ValueError, match="not within"):
        plane.input(event)


async def test_arena_limits_are_told_and_the_client_lives() -> None:
    async with open_plane(arenas=ArenaLimits(total=64 << 20, inputs=32 << 20, per_client=8192)) as plane:
        client = await plane.attach()
        await client.send(local.AllocateArena(2, 8193), local.AllocateArena(3, 0), local.AllocateArena(4, 8192))
        error = from_wire((await client.receive(local.RequestFailed)).error)
        assert isinstance(error, LimitExceeded)
        assert error.limit == "limits.arena_bytes_per_client"
        error = from_wire((await client.receive(local.RequestFailed)).error)
        assert isinstance(error, InvalidArgument)
        assert (await client.receive(local.ArenaGranted)).request == 4


async def test_another_clients_arena_cannot_be_named(plane: Plane) -> None:
    owner, _ = await plane.join(0)
    await owner.send(local.AllocateArena(2, 4096))
    granted = await owner.receive(local.ArenaGranted)
    thief, _ = await plane.join(1)
    await thief.send(submit(2, arena=granted.arena), local.ReleaseArena(granted.arena))
    failed = await thief.receive(local.RequestFailed)
    assert "not one of this client's" in failed.error[1]
    await owner.send(submit(3, arena=granted.arena))
    assert (await plane.sink.told(Submitted)).request == 3


async def test_a_small_input_travels_inside_the_submit(plane: Plane) -> None:
    client, number = await plane.join(1)
    message = submit(2, payload=FOUR, name="w", priority=-3, deadline=5.0, algorithm="direct")
    await client.send(message, submit(3, payload=FOUR))
    event = await plane.sink.told(Submitted)
    assert (event.client, event.request, event.group, event.rank, event.name) == (number, 2, GROUP, 1, "w")
    assert event.fingerprint == Fingerprint("all_reduce", 1, 1, "(4,)", 4, -1, "direct")
    assert event.priority == -3
    assert 0 < event.deadline_at - plane.sink.now() <= 5
    assert plane.input(event) == FOUR
    other = await plane.sink.told(Submitted, 2)
    assert 55 < other.deadline_at - plane.sink.now() <= 60  # the group's default
    plane.deliver(number, 2, FOUR)
    plane.deliver(number, 2, FOUR)  # answered already: nothing happens
    assert await client.receive(local.Done) == local.Done(2, FOUR, -1, 0, 16, 0, False, (), "direct", 0.25)
    await client.send(submit(4, payload=FOUR))
    third = await plane.sink.told(Submitted, 3)
    assert third.source == event.source  # the slot is used again
    plane.server.failed(number, 4, AgentUnavailable("stopping"))
    assert (await client.receive(local.RequestFailed)).request == 4


async def test_operations_without_data_have_no_source(plane: Plane) -> None:
    client, number = await plane.join(1)
    await client.send(
        submit(2, kind="barrier", dtype=3, shape="", count=0),
        submit(3, kind="broadcast", op=0, root=0),
        submit(4, count=0, shape="(0,)", payload=b""),
    )
    await plane.sink.told(Submitted, 3)
    assert [event.source for event in plane.sink.engine if isinstance(event, Submitted)] == [None] * 3
    plane.deliver(number, 2, None)
    done = await client.receive(local.Done)
    assert (done.payload, done.arena, done.pieces) == (None, -1, False)


@pytest.mark.parametrize("pieces", [[40000], [1, 2, 39997], [10000] * 4])
async def test_an_input_in_pieces_is_put_together(plane: Plane, pieces: list[int]) -> None:
    client, number = await plane.join(shared_memory=False)
    before = plane.arenas.total_bytes
    data = os.urandom(40000)
    messages: list[local.ToAgent] = [submit(2, count=10000, upload=True)]
    begin = 0
    for length in pieces:
        messages.append(local.Upload(2, data[begin : begin + length]))
        begin += length
    await client.send(*messages, submit(3, payload=FOUR))
    event = await plane.sink.told(Submitted)
    assert event.request == 2
    assert plane.input(event) == data
    assert (await plane.sink.told(Submitted, 2)).request == 3
    assert plane.arenas.client_bytes(number) == 40000
    plane.deliver(number, 2, None)
    await client.receive(local.Done)
    assert plane.arenas.total_bytes == before


async def test_a_refused_upload_fails_once_and_its_pieces_are_ignored() -> None:
    async with open_plane(arenas=ArenaLimits(total=64 << 20, inputs=32 << 20, per_client=8192)) as plane:
        client, _ = await plane.join()
        await client.send(submit(2, count=10000, upload=True), local.Upload(2, bytes(40000)), submit(3, payload=FOUR))
        failed = await client.receive(local.RequestFailed)
        assert failed.request == 2
        assert (await plane.sink.told(Submitted)).request == 3
        assert [event.request for event in plane.sink.refused] == [2]


@pytest.mark.parametrize("changes", [{"count": 10000}, {"count": 10000, "payload": FOUR}])
async def test_pieces_of_a_refused_upload_that_has_not_ended_are_ignored(changes: dict[str, object]) -> None:
    async with open_plane(arenas=ArenaLimits(total=64 << 20, inputs=32 << 20, per_client=8192)) as plane:
        plane.sink.refuse = lambda client, request, error: None  # a group that changes ends nothing for a while
        client, number = await plane.join()
        await client.send(
            submit(2, upload=True, **changes), local.Upload(2, bytes(20000)), local.Upload(2, bytes(20000))
        )
        await client.send(submit(3, payload=FOUR))
        assert (await plane.sink.told(Submitted)).request == 3
        [refused] = plane.sink.refused
        assert refused.request == 2
        assert refused.refused is not None
        plane.server.failed(number, 2, refused.refused)
        assert (await client.receive(local.RequestFailed)).request == 2


async def test_the_rank_is_gone_before_its_upload_is_complete(plane: Plane) -> None:
    client, number = await plane.join()
    before = plane.arenas.total_bytes
    await client.send(submit(2, count=10000, upload=True), local.Upload(2, bytes(4000)))
    await client.send(local.Leave(GROUP), local.Upload(2, bytes(36000)))
    assert "left meanwhile" in (await client.receive(local.RequestFailed)).error[1]
    await client.send(submit(3, count=10000, upload=True))
    client.close()
    await plane.sink.until(lambda: number in plane.sink.gone)
    assert plane.arenas.total_bytes == before


async def test_a_result_arena_is_shown_once_and_read_under_leases(plane: Plane) -> None:
    client, number = await plane.join()
    await plane.result_arena(RESULT, 4096)
    with plane.arenas.view(Region(RESULT, 0, 16)) as view:
        view[:] = FOUR
    await client.send(submit(2, payload=FOUR), submit(3, payload=FOUR))
    await plane.sink.told(Submitted, 2)
    plane.deliver(number, 2, None, arena=RESULT, lease=8)
    plane.deliver(number, 3, None, arena=RESULT, lease=9)
    assert await client.receive(local.ResultArena) == local.ResultArena(RESULT, GROUP, 4096)
    assert await client.receive(local.Done) == local.Done(2, None, RESULT, 0, 4096, 8, False, (), "direct", 0.25)
    assert (await client.receive(local.Done)).lease == 9
    [descriptor] = client.descriptors
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    with mmap.mmap(descriptor, 4096, prot=mmap.PROT_READ) as theirs:
        assert theirs[:16] == FOUR
    await client.send(local.ReleaseLeases((8, 9)))
    assert await plane.sink.told(LeasesReturned) == LeasesReturned(number, (8, 9))
    plane.server.arena_gone(RESULT)
    plane.server.arena_gone(RESULT)
    assert await client.receive(local.ResultArenaGone) == local.ResultArenaGone(RESULT)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("nbytes", [64, 3 * local.CHUNK - 8])
async def test_results_travel_inside_messages_where_the_client_wants_it(
    plane: Plane, shared_memory: bool, nbytes: int
) -> None:
    client, number = await plane.join(shared_memory=shared_memory)
    await plane.result_arena(RESULT, nbytes)
    data = os.urandom(nbytes)
    with plane.arenas.view(Region(RESULT, 0, nbytes)) as view:
        view[:] = data
    await client.send(submit(2, payload=FOUR, inline_result=shared_memory), submit(3, payload=FOUR))
    await plane.sink.told(Submitted, 2)
    plane.deliver(number, 2, None, arena=RESULT, lease=8)
    done = await client.receive(local.Done)
    assert (done.arena, done.lease, done.nbytes, done.pieces) == (-1, 0, nbytes, nbytes > 64)
    got = done.payload or b""
    while len(got) < nbytes:
        piece = await client.receive(local.Download)
        got += piece.data
        assert piece.last == (len(got) == nbytes)
    assert got == data
    assert await plane.sink.told(LeasesReturned) == LeasesReturned(number, (8,))
    assert client.descriptors == []


async def test_a_result_that_cannot_be_shown_still_ends_by_an_error(plane: Plane) -> None:
    client, number = await plane.join()
    await client.send(submit(2, payload=FOUR))
    event = await plane.sink.told(Submitted)
    with pytest.raises(ValueError, match="no descriptor"):
        plane.deliver(number, 2, None, arena=RESULT, lease=1)
    assert plane.input(event) == FOUR
    plane.server.failed(number, 2, AgentUnavailable("a defect"))
    assert (await client.receive(local.RequestFailed)).request == 2


async def test_a_long_result_by_copy_travels_in_pieces(plane: Plane) -> None:
    client, number = await plane.join()
    await client.send(submit(2, payload=FOUR))
    await plane.sink.told(Submitted)
    data = os.urandom(20000)
    plane.deliver(number, 2, data)
    assert (await client.receive(local.Done)).pieces
    assert await client.receive(local.Download) == local.Download(2, data, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 5, "payload": FOUR}, "holds no rank of group 5"),
        ({"kind": "all_gather", "payload": FOUR}, "there are all_reduce, all_reduce_many, broadcast, barrier"),
        ({"dtype": 99, "payload": FOUR}, "dtype 99 is not known; there are 1 (float32)"),
        ({"op": 99, "payload": FOUR}, "reduction 99 is not known"),
        ({"op": 0, "payload": FOUR}, "reduction 'copy' is not supported"),
        ({"dtype": 3, "op": 2, "payload": FOUR}, "mean of int32 is not defined"),
        ({"payload": FOUR[:-1]}, "has 15 bytes, 16 were expected"),
        ({"payload": bytes(8196), "count": 2049}, "over the inline limit of 8192"),
        ({}, "16 bytes of input are missing"),
        ({"payload": FOUR, "upload": True}, "not in several ways"),
        ({"arena": 1}, "arena 1 is not one of this client's"),
        ({"arena": 0}, "arena 0 is not one of this client's"),
        ({"root": 0, "payload": FOUR}, "has no root"),
        ({"kind": "broadcast", "op": 0, "root": 2, "payload": FOUR}, "root 2 is outside the group"),
        ({"kind": "broadcast", "op": 1, "root": 0, "payload": FOUR}, "does not reduce"),
        ({"kind": "barrier", "count": 4}, "a barrier has no elements"),
        ({"count": (1 << 63) - 1, "arena": 1}, "more than any agent can reduce"),
    ],
)
async def test_a_submit_without_sense_is_refused_and_counts(
    plane: Plane, changes: dict[str, object], message: str
) -> None:
    client, _ = await plane.join()
    await client.send(submit(2, **changes), submit(3, payload=FOUR))
    failed = await client.receive(local.RequestFailed)
    assert failed.request == 2
    assert message in failed.error[1]
    assert (await plane.sink.told(Submitted)).request == 3
    # The other ranks' calls of that name must not meet this rank's next one. Nobody has a group that it is not in.
    assert [event.request for event in plane.sink.refused] == ([] if "group" in changes else [2])


@pytest.mark.parametrize(("offset", "fits"), [(0, True), (3, True), (4080, True), (4081, False), (1 << 62, False)])
async def test_the_input_must_lie_within_the_arena(plane: Plane, offset: int, fits: bool) -> None:
    client, _ = await plane.join()
    await client.send(local.AllocateArena(2, 4096))
    granted = await client.receive(local.ArenaGranted)
    await client.send(submit(3, arena=granted.arena, offset=offset))
    if fits:
        assert (await plane.sink.told(Submitted)).source == Region(granted.arena, offset, 16)
    else:
        assert "do not lie within arena" in (await client.receive(local.RequestFailed)).error[1]


async def test_requests_in_flight_are_limited() -> None:
    async with open_plane(limits=LocalLimits(requests=2)) as plane:
        client, number = await plane.join()
        await client.send(*(submit(request, payload=FOUR) for request in (2, 3, 4)))
        error = from_wire((await client.receive(local.RequestFailed)).error)
        assert isinstance(error, LimitExceeded)
        assert error.limit == "limits.requests"
        assert [event.request for event in plane.sink.refused] == [4]
        plane.deliver(number, 2, FOUR)
        await client.receive(local.Done)
        await client.send(submit(5, payload=FOUR))
        assert (await plane.sink.told(Submitted, 3)).request == 5


async def test_an_ended_group_answers_later_submits_with_its_error(plane: Plane) -> None:
    client, number = await plane.join()
    error = PeerLost("node n1 is gone", nodes=["n1"], ranks=[1])
    plane.server.group_ended([number, number + 1], GROUP, error)
    assert (await client.receive(local.GroupEnded)).group == GROUP
    await client.send(submit(2, payload=FOUR))
    failed = from_wire((await client.receive(local.RequestFailed)).error)
    assert isinstance(failed, PeerLost)
    assert failed.ranks == (1,)


async def test_operations_of_a_client_that_died_keep_their_inputs_to_the_end(plane: Plane) -> None:
    client, number = await plane.join()
    before = plane.arenas.total_bytes
    await client.send(local.AllocateArena(2, 4096))
    granted = await client.receive(local.ArenaGranted)
    await client.send(submit(3, arena=granted.arena), submit(4, payload=FOUR))
    event = await plane.sink.told(Submitted)
    client.close()
    await plane.sink.until(lambda: number in plane.sink.gone)
    assert plane.server.clients == 0
    assert plane.input(event) == bytes(16)
    plane.deliver(number, 3, None, arena=RESULT, lease=6)
    assert LeasesReturned(number, (6,)) in plane.sink.engine
    plane.server.failed(number, 4, InvalidArgument("no"))
    assert plane.arenas.total_bytes == before
    plane.server.failed(number, 4, InvalidArgument("no"))


async def test_a_dead_process_holds_no_rank_against_its_rerun(plane: Plane) -> None:
    dead, number = await plane.join(0)
    rerun = await plane.attach()
    await rerun.send(local.Join(1, "job", "world", 0, 2, 0, 30.0, 60.0))
    dead.close()  # both wait in their sockets now; which the loop reads first is not known
    await plane.sink.told(ClientJoining, 2)
    kinds = [type(event) for event in plane.sink.membership]
    assert kinds == [ClientJoining, ClientGone, ClientJoining]
    assert not plane.server.is_connected(number)


async def test_the_socket_itself_tells_that_a_process_is_gone(plane: Plane) -> None:
    client, number = await plane.join(0)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client.sock, local.encode(local.Leave(GROUP)))
    client.close()
    assert not plane.server.is_connected(number)  # without a turn of the loop
    assert plane.sink.membership[1:] == [ClientLeaving(number, GROUP), ClientGone(number)]


async def test_a_deadline_that_is_no_number_is_no_message(plane: Plane) -> None:
    client, number = await plane.join()
    await client.send(submit(2, payload=FOUR, deadline=math.nan))
    [refused] = await client.rest()
    assert isinstance(refused, local.Refused)
    assert number in plane.sink.gone


async def test_what_a_client_was_doing_when_it_ended_is_told(plane: Plane) -> None:
    client, number = await plane.join()
    await client.send(submit(2, payload=FOUR, name="x"), submit(3, payload=FOUR), submit(4, payload=FOUR, name="y"))
    await plane.sink.told(Submitted, 3)
    plane.deliver(number, 2, FOUR)
    client.close()
    doing = (await plane.sink.told(ClientGone)).doing
    assert doing.startswith("while it waited for all_reduce (its call 2), all_reduce 'y' (its call 3), for ")
    client, number = await plane.join(1)
    await client.send(submit(2, payload=FOUR, name="x"))
    await plane.sink.told(Submitted, 4)
    plane.deliver(number, 2, FOUR)
    client.close()
    doing = (await plane.sink.told(ClientGone, 2)).doing
    assert doing == "between operations: the last one that it called was all_reduce 'x' (its call 1)"
    observer = await plane.attach()
    observer.close()
    assert (await plane.sink.told(ClientGone, 3)).doing == ""
