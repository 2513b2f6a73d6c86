"""Data lands where the receiver posted it, once, and nowhere else."""

from __future__ import annotations

import mmap

import psutil
import pytest
from tests.contract.conftest import Endpoint, pattern

from allreduced.core.errors import AgentUnavailable, ProtocolError
from allreduced.transports.base import MAX_FRAME

FRAME = 64 << 10
_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python 3.11 does not name."""


@pytest.mark.parametrize("flows", [1, 2, 5])
async def test_sends_of_all_sizes_land_at_their_offsets(endpoint: Endpoint, flows: int) -> None:
    sizes = [1, 2, FRAME - 1, FRAME, FRAME + 1, 3 * FRAME + 17, 40 * FRAME]
    total = sum(sizes)
    source, target = pattern(total, 3), bytearray(total)
    async with endpoint.pair(flows=flows, max_frame=FRAME) as pair:
        token = pair.far.post_receive(70, memoryview(target))
        at = 0
        for send, size in enumerate(sizes):
            pair.near.send(send, token, at, memoryview(source)[at : at + size], tag=send + (1 << 63))
            at += size
        await pair.far_events.until_bytes(70, total)
        await pair.near_events.until(lambda: len(pair.near_events.sent_sends) == len(sizes))
        assert target == source
        assert sorted(pair.near_events.sent_sends) == list(range(len(sizes)))
        covered = 0
        for _, offset, nbytes, tag in sorted(pair.far_events.pieces, key=lambda piece: piece[1]):
            send = tag - (1 << 63)
            start = sum(sizes[:send])
            assert offset == covered
            assert 0 < nbytes <= FRAME
            assert start <= offset < start + sizes[send]
            covered += nbytes
        assert covered == total
        frames = sum(-(-size // FRAME) for size in sizes)
        assert (pair.near.stats.frames_sent, pair.near.stats.bytes_sent) == (frames, total)
        assert (pair.far.stats.frames_received, pair.far.stats.bytes_received) == (frames, total)
        assert pair.far.stats.frames_unclaimed == 0
        assert pair.far_events.cancelled == []


async def test_offsets_beyond_4_gib(endpoint: Endpoint) -> None:
    # Only the pages that are touched exist, but for a real device, which pins them all.
    size, border = 9 << 30, 1 << 32
    if endpoint.pins and psutil.virtual_memory().available < 2 * size:
        pytest.skip("registering 9 GiB takes as much memory")
    places = [0, border - FRAME // 2, border + FRAME, size - FRAME]
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE) as memory:
        async with endpoint.pair(flows=2, max_frame=FRAME) as pair:
            target = memoryview(memory)
            token = pair.far.post_receive(1, target)
            target.release()
            for send, place in enumerate(places):
                pair.near.send(send, token, place, memoryview(pattern(FRAME, send)))
            await pair.far_events.until_bytes(1, FRAME * len(places))
            assert sorted(offset for _, offset, _, _ in pair.far_events.pieces) == places
            for send, place in enumerate(places):
                assert memory[place : place + FRAME] == pattern(FRAME, send)
            assert memory[border - FRAME : border - FRAME // 2] == bytes(FRAME // 2)
            pair.far.cancel_receive(1)
            await pair.far_events.until(lambda: pair.far_events.cancelled == [1])


async def test_both_directions_at_once(endpoint: Endpoint) -> None:
    size = 3_000_001
    sources = pattern(size, 1), pattern(size, 2)
    targets = bytearray(size), bytearray(size)
    async with endpoint.pair(flows=3) as pair:
        tokens = pair.near.post_receive(1, memoryview(targets[0])), pair.far.post_receive(1, memoryview(targets[1]))
        pair.far.send(5, tokens[0], 0, memoryview(sources[0]))
        pair.near.send(5, tokens[1], 0, memoryview(sources[1]))
        await pair.near_events.until_bytes(1, size)
        await pair.far_events.until_bytes(1, size)
        assert targets == sources


async def test_many_receives_of_different_sizes(endpoint: Endpoint) -> None:
    sizes = [(7919 * k) % 100_003 + 1 for k in range(60)]
    targets = [bytearray(size) for size in sizes]
    async with endpoint.pair(flows=4, max_frame=10_000) as pair:
        tokens = [pair.far.post_receive(k, memoryview(target)) for k, target in enumerate(targets)]
        for k, token in enumerate(tokens):
            pair.near.send(k, token, 0, memoryview(pattern(sizes[k], k)), tag=k, priority=k % 3)
        await pair.far_events.until(lambda: sum(piece[2] for piece in pair.far_events.pieces) == sum(sizes))
        assert all(targets[k] == pattern(size, k) for k, size in enumerate(sizes))
        assert all(receive == tag for receive, _, _, tag in pair.far_events.pieces)


async def test_elements_of_any_type_are_bytes_on_the_link(endpoint: Endpoint) -> None:
    source, target = memoryview(pattern(80, 9)).cast("l"), memoryview(bytearray(80)).cast("B", (5, 16))
    async with endpoint.pair() as pair:
        pair.near.send(1, pair.far.post_receive(1, target), 0, source)
        await pair.far_events.until_bytes(1, 80)
        assert target.tobytes() == source.tobytes()


async def test_a_posting_is_over_when_every_byte_came(endpoint: Endpoint) -> None:
    first, second = bytearray(100), bytearray(100)
    source = pattern(100, 4)
    async with endpoint.pair(flows=1) as pair:
        old = pair.far.post_receive(8, memoryview(first))
        with pytest.raises(ValueError, match="receive 8"):
            pair.far.post_receive(8, memoryview(second))
        pair.near.send(1, old, 50, memoryview(source)[50:])
        pair.near.send(2, old, 0, memoryview(source)[:50])
        await pair.far_events.until_bytes(8, 100)
        new = pair.far.post_receive(8, memoryview(second))
        pair.near.send(3, old, 0, memoryview(bytes(100)))
        pair.near.send(4, new, 0, memoryview(source))
        await pair.far_events.until_bytes(8, 200)
        assert first == second == source
        assert pair.far.stats.frames_unclaimed == 1
        pair.far.cancel_receive(8)
        pair.near.send_control(b"end")
        await pair.far_events.until_control([b"end"])
        assert pair.far_events.cancelled == []


async def test_empty_sends_and_empty_receives(endpoint: Endpoint) -> None:
    async with endpoint.pair() as pair:
        token = pair.far.post_receive(1, memoryview(bytearray()))
        pair.near.send(2, token, 0, memoryview(b""))
        assert pair.near_events.count() == 0
        await pair.near_events.until(lambda: pair.near_events.sent_sends == [2])
        pair.far.cancel_receive(1)
        pair.far.send_control(b"end")
        await pair.near_events.until_control([b"end"])
        assert pair.far_events.count() == 0


async def test_bad_arguments_are_refused_and_harm_nothing(endpoint: Endpoint) -> None:
    async with endpoint.pair() as pair:
        with pytest.raises(ValueError, match="read-only"):
            pair.far.post_receive(1, memoryview(b"1234"))
        with pytest.raises(TypeError):
            pair.far.post_receive(1, memoryview(bytearray(8))[::2])
        token = pair.far.post_receive(1, memoryview(bytearray(4)))
        with pytest.raises(TypeError):
            pair.near.send(1, token, 0, memoryview(bytearray(8))[::2])
        with pytest.raises(ValueError, match="64 bits"):
            pair.near.send(1, token, -1, memoryview(b"1234"))
        with pytest.raises(ValueError, match="64 bits"):
            pair.near.send(1, token, 0, memoryview(b"1234"), tag=1 << 64)
        pair.near.send(1, token, 0, memoryview(b"1234"))
        with pytest.raises(ValueError, match="send 1"):
            pair.near.send(1, token, 0, memoryview(b"1234"))
        await pair.far_events.until_bytes(1, 4)


async def test_a_frame_outside_the_buffer_ends_the_link(endpoint: Endpoint) -> None:
    target = bytearray(100)
    async with endpoint.pair() as pair:
        token = pair.far.post_receive(8, memoryview(target)[10:20])
        pair.near.send(1, token, 5, memoryview(b"overflow"))
        await pair.far_events.until_closed()
        await pair.near_events.until_closed()
        assert isinstance(pair.far_events.ends[0], ProtocolError)
        assert "bytes 5 to 13 of receive 8, which has 10" in pair.far_events.ends[0].message
        assert isinstance(pair.near_events.ends[0], AgentUnavailable)
        assert target == bytearray(100)
        assert pair.far_events.cancelled == [8]


async def test_bytes_that_come_twice_end_the_link(endpoint: Endpoint) -> None:
    async with endpoint.pair(flows=1) as pair:
        token = pair.far.post_receive(8, memoryview(bytearray(100)))
        pair.near.send(1, token, 0, memoryview(bytes(40)))
        pair.near.send(2, token, 39, memoryview(bytes(10)))
        await pair.far_events.until_closed()
        assert isinstance(pair.far_events.ends[0], ProtocolError)
        assert pair.far_events.nbytes(8) == 40


async def test_a_token_that_no_link_gave_ends_the_link(endpoint: Endpoint) -> None:
    async with endpoint.pair() as pair:
        pair.near.send(1, b"bad", 0, memoryview(b"1234"))
        assert pair.near_events.count() == 0
        await pair.near_events.until_closed()
        assert isinstance(pair.near_events.ends[0], ProtocolError)
        assert pair.near_events.order == ["sent", "closed"]


async def test_a_token_of_an_earlier_link_reaches_nothing_on_the_next(endpoint: Endpoint) -> None:
    async with endpoint.pair() as pair:
        stale = pair.far.post_receive(7, memoryview(bytearray(4)))
    into = bytearray(4)
    async with endpoint.pair() as pair:
        token = pair.far.post_receive(7, memoryview(into))
        pair.near.send(1, stale, 0, memoryview(b"late"))
        await pair.near_events.until(lambda: pair.near_events.sent_sends == [1])
        pair.near.send(2, token, 0, memoryview(b"true"))
        await pair.far_events.until_bytes(7, 4)
        assert pair.far_events.pieces == [(7, 0, 4, 0)]
        assert into == b"true"


async def test_an_urgent_send_passes_a_large_one(endpoint: Endpoint) -> None:
    size = 24 << 20
    source, target, small = bytearray(size), bytearray(size), bytearray(1000)
    async with endpoint.pair(flows=1, max_frame=FRAME) as pair:
        bulk = pair.far.post_receive(1, memoryview(target))
        urgent = pair.far.post_receive(2, memoryview(small))

        def first_piece(link: object, receive: int) -> None:
            if len(pair.far_events.pieces) == 1:
                pair.near.send(2, urgent, 0, memoryview(pattern(1000, 2)), priority=1)

        pair.far_events.on_received = first_piece
        pair.near.send(1, bulk, 0, memoryview(source))
        await pair.far_events.until_bytes(1, size)
        receives = [piece[0] for piece in pair.far_events.pieces]
        assert receives.count(2) == 1
        assert receives.index(2) < len(receives) - 1
        assert small == pattern(1000, 2)


async def test_priority_decides_and_equals_take_turns(endpoint: Endpoint) -> None:
    async with endpoint.pair(flows=1, max_frame=10) as pair:
        tokens = [pair.far.post_receive(k, memoryview(bytearray(30))) for k in range(4)]
        for k, priority in enumerate([0, 0, -1, 5]):
            pair.near.send(k, tokens[k], 0, memoryview(bytes(30)), priority=priority)
        await pair.far_events.until(lambda: len(pair.far_events.pieces) == 12)
        assert [piece[0] for piece in pair.far_events.pieces] == [3, 3, 3, 0, 1, 0, 1, 0, 1, 2, 2, 2]
        assert [piece[1] for piece in pair.far_events.pieces] == [0, 10, 20, 0, 0, 10, 10, 20, 20, 0, 10, 20]


async def test_shares_get_equal_parts_whatever_their_priorities_and_number_of_sends(endpoint: Endpoint) -> None:
    sends = {1: (100, 9), 2: (100, 9), 3: (100, 9), 4: (200, 0)}  # one greedy user, one with a single modest send
    async with endpoint.pair(flows=1, max_frame=10) as pair:
        tokens = {k: pair.far.post_receive(k, memoryview(bytearray(40))) for k in sends}
        for k, (share, priority) in sends.items():
            pair.near.send(k, tokens[k], 0, memoryview(bytes(40)), priority=priority, share=share)
        await pair.far_events.until(lambda: len(pair.far_events.pieces) == 16)
        order = [piece[0] for piece in pair.far_events.pieces]
        assert order == [1, 4, 2, 4, 3, 4, 1, 4, 2, 3, 1, 2, 3, 1, 2, 3]


async def test_memory_can_be_unmapped_in_the_callback_that_gives_it_back(endpoint: Endpoint) -> None:
    size = 300_000
    memory = {name: mmap.mmap(-1, size) for name in ("sent", "received", "cancelled", "stopped")}
    async with endpoint.pair() as pair:

        def received(link: object, receive: int) -> None:
            if pair.far_events.nbytes(1) == size:
                memory["received"].close()

        def sent(link: object, send: int) -> None:
            memory["sent" if send == 1 else "stopped"].close()

        pair.far_events.on_received = received
        pair.far_events.on_cancelled = lambda link, receive: memory["cancelled"].close()
        pair.near_events.on_sent = sent
        token = pair.far.post_receive(1, memoryview(memory["received"]))
        pair.far.post_receive(2, memoryview(memory["cancelled"]))
        pair.near.send(1, token, 0, memoryview(memory["sent"]))
        pair.near.send(2, token, 0, memoryview(memory["stopped"]), priority=-1)
        pair.near.cancel_send(2)
        pair.far.cancel_receive(2)
        await pair.far_events.until_bytes(1, size)
        await pair.far_events.until(lambda: pair.far_events.cancelled == [2])
        await pair.near_events.until(lambda: len(pair.near_events.sent_sends) == 2)
        assert all(area.closed for area in memory.values())


@pytest.mark.parametrize("who", ["near", "far"])
async def test_memory_can_be_unmapped_when_the_link_ends(endpoint: Endpoint, who: str) -> None:
    size = 40 << 20
    out, into = mmap.mmap(-1, size), mmap.mmap(-1, size)
    async with endpoint.pair() as pair:
        pair.near_events.on_sent = lambda link, send: out.close()
        pair.far_events.on_cancelled = lambda link, receive: into.close()

        def stop(link: object, receive: int) -> None:
            end = pair.near if who == "near" else pair.far
            end.abort(AgentUnavailable("enough"))

        pair.far_events.on_received = stop
        pair.near.send(1, pair.far.post_receive(1, memoryview(into)), 0, memoryview(out))
        await pair.near_events.until_closed()
        await pair.far_events.until_closed()
        assert out.closed
        assert into.closed
        assert (pair.near_events.sent_sends, pair.far_events.cancelled) == ([1], [1])


async def test_sides_with_different_settings_understand_each_other(endpoint: Endpoint) -> None:
    size = MAX_FRAME + 1000
    source, there, back = pattern(size, 5), bytearray(size), bytearray(size)
    async with endpoint.pair(flows=1, max_frame=FRAME, near={"flows": 3, "max_frame": MAX_FRAME}) as pair:
        pair.near.send(1, pair.far.post_receive(1, memoryview(there)), 0, memoryview(source))
        pair.far.send(2, pair.near.post_receive(2, memoryview(back)), 0, memoryview(source))
        await pair.far_events.until_bytes(1, size)
        await pair.near_events.until_bytes(2, size)
        assert (there, back) == (source, source)
        assert (pair.near.stats.frames_sent, pair.far.stats.frames_sent) == (2, -(-size // FRAME))
