"""RDMA links on verbs without a device: what they copy, how they cancel, and how they fail."""

from __future__ import annotations

import asyncio
import gc
import mmap
from dataclasses import replace

import pytest
from tests.contract.conftest import Recorder, pattern
from tests.support.fake_verbs import NOT_READY, PROTECTION, REFUSED, RETRIES, FakeFabric, FakePair
from tests.support.rdma_rig import Rig, options, rig, turns, turns_until

from allreduced.core.errors import AgentUnavailable, ProtocolError
from allreduced.transports.rdma import agreement, exposures, wire
from allreduced.transports.rdma import link as rdma_link
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.sender import WINDOW
from allreduced.transports.rdma.verbs_port import AsyncKind, SendKind, SendRequest

FRAME = 64 << 10


async def test_no_byte_of_large_frames_is_copied_and_each_wakes_the_loop_once_at_most() -> None:
    frames = 100
    target, source = bytearray(frames * FRAME), pattern(frames * FRAME, 3)
    async with rig() as link:
        link.near.send(1, link.far.post_receive(1, memoryview(target)), 0, memoryview(source))
        await link.far_events.until_bytes(1, frames * FRAME)
        await link.near_events.until(lambda: link.near_events.sent_sends == [1])
        assert target == source
        assert link.near.stats.bytes_copied == link.far.stats.bytes_copied == 0
        assert 0 < link.near.stats.completion_events <= frames
        assert 0 < link.far.stats.completion_events <= frames
        assert link.far.stats.frames_received == frames


async def test_small_frames_are_copied_once_on_each_side() -> None:
    target = bytearray(8 << 10)
    async with rig() as link:
        link.near.send(1, link.far.post_receive(1, memoryview(target)), 0, memoryview(pattern(8 << 10, 1)))
        await link.far_events.until_bytes(1, 8 << 10)
        assert target == pattern(8 << 10, 1)
        assert link.near.stats.bytes_copied == link.far.stats.bytes_copied == 8 << 10


async def test_nothing_but_receives_can_be_written_by_the_peer() -> None:
    size = 3 * FRAME
    async with rig() as link:
        with mmap.mmap(-1, size) as memory:
            target = bytearray(size)
            token = link.far.post_receive(1, memoryview(target))
            link.far.post_receive(2, memoryview(bytearray(FRAME)))
            link.fabric.held = True
            link.near.send(1, token, 0, memoryview(memory))
            link.near.send(2, token, 0, memoryview(pattern(size, 1)))
            await turns()
            regions = [list(pair.domain.regions.values()) for pair in (link.near_pairs[0], link.far_pairs[0])]
            assert [sorted(region.length for region in of if region.remote_write) for of in regions] == [
                [],
                [FRAME, size],
            ]
            assert size in [region.length for region in regions[0]]
            link.near.abort(AgentUnavailable("enough"))
            await link.until_closed()


async def test_peers_whose_messages_have_other_sizes_understand_each_other() -> None:
    near = options("a", 1, rdma=RdmaOptions(depth=8, small=256))
    far = options("b", 2, rdma=RdmaOptions(depth=64, small=32 << 10))
    sizes = [1, 255, 256, 257, 20_000, 32 << 10, (32 << 10) + 1, 200_000]
    async with rig(near=near, far=far) as link:
        for k, size in enumerate(sizes):
            there, back = bytearray(size), bytearray(size)
            link.near.send(k, link.far.post_receive(k, memoryview(there)), 0, memoryview(pattern(size, k)))
            link.far.send(k, link.near.post_receive(k, memoryview(back)), 0, memoryview(pattern(size, k + 1)))
            await link.far_events.until_bytes(k, size)
            await link.near_events.until_bytes(k, size)
            assert (there, back) == (pattern(size, k), pattern(size, k + 1))


async def test_memory_that_cannot_be_registered_is_copied(caplog: pytest.LogCaptureFixture) -> None:
    fabric = FakeFabric()
    size = 300_000
    target = bytearray(size)
    async with rig(fabric) as link:
        fabric.max_registration = 100_000
        for k in (1, 2):
            link.near.send(k, link.far.post_receive(k, memoryview(target)), 0, memoryview(pattern(size, k)))
            await link.far_events.until_bytes(k, size)
            assert target == pattern(size, k)
        assert link.far.stats.bytes_copied == link.near.stats.bytes_copied == 2 * size
        assert caplog.text.count("rdma_registration_failed") == 1
        assert "ulimit -l" in caplog.text


async def test_a_mapping_is_registered_once_however_much_is_sent_from_it() -> None:
    size = 10 * FRAME
    made: list[int] = []
    async with rig() as link:
        at_rest = link.fabric.open["region"]
        memory = mmap.mmap(-1, size)
        memory[:] = bytes(pattern(size, 1))
        target = bytearray(size)
        token = link.far.post_receive(1, memoryview(target))
        for k in range(10):
            view = memoryview(memory)[k * FRAME : (k + 1) * FRAME]
            link.near.send(k, token, k * FRAME, view)
            del view
            await link.near_events.until(lambda: len(link.near_events.sent_sends) > len(made))
            made.append(link.fabric.open["region"] - at_rest)
        await link.far_events.until_bytes(1, size)
        assert target == pattern(size, 1)
        assert made[0] == 2  # the receive, and the mapping
        assert set(made[:-1]) == {2}
        memory.close()
        again = mmap.mmap(-1, size)  # often in the same place
        again[:] = bytes(pattern(size, 2))
        link.near.send(20, link.far.post_receive(2, memoryview(target)), 0, memoryview(again))
        await link.far_events.until_bytes(2, size)
        await link.near_events.until(lambda: link.near_events.sent_sends[-1] == 20)
        assert target == pattern(size, 2)
        again.close()
        del again, memory
        gc.collect()
        assert link.fabric.open["region"] == at_rest


async def test_a_mapping_that_cannot_be_registered_whole_is_registered_by_sends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig() as link:
        link.fabric.max_registration = 5 * FRAME
        target = bytearray(4 * FRAME)
        with mmap.mmap(-1, 100 * FRAME) as memory:
            memory[: 4 * FRAME] = bytes(pattern(4 * FRAME, 1))
            link.near.send(1, link.far.post_receive(1, memoryview(target)), 0, memoryview(memory)[: 4 * FRAME])
            await link.near_events.until(lambda: link.near_events.sent_sends == [1])
        await link.far_events.until_bytes(1, 4 * FRAME)
        assert target == pattern(4 * FRAME, 1)
        assert link.near.stats.bytes_copied == 0
        assert caplog.text == ""


# Cancelling


async def test_a_cancelled_receive_is_given_back_once_no_write_is_on_its_way() -> None:
    size = 8 * FRAME
    with mmap.mmap(-1, size) as memory:
        async with rig() as link:
            link.far_events.on_cancelled = lambda end, receive: memory.close()
            link.near.send(1, link.far.post_receive(1, memoryview(memory)), 0, memoryview(pattern(size, 1)))
            link.fabric.held = True
            await turns()
            assert link.fabric.most_queued > 1
            link.far.cancel_receive(1)
            for _ in range(20):
                link.near.send_control(b"turn")
                await turns()
            assert link.far_events.cancelled == []
            link.fabric.release()
            await link.far_events.until(lambda: link.far_events.cancelled == [1])
            assert memory.closed
            assert link.far_events.pieces == []
            await link.near_events.until(lambda: link.near_events.sent_sends == [1])
            await turns_until(lambda: link.far.stats.frames_unclaimed == 8)
            await _still_works(link)


async def test_a_peer_that_does_not_stop_loses_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposures, "REVOKE_TIMEOUT", 0.01)
    target = bytearray(8 * FRAME)
    async with rig() as link:
        link.near.send(1, link.far.post_receive(1, memoryview(target)), 0, memoryview(pattern(8 * FRAME, 1)))
        link.fabric.held = True
        await turns()
        link.far.cancel_receive(1)
        await link.until_closed()
        link.fabric.release()
        assert target == bytearray(8 * FRAME)
        reason = link.reason(link.far_events)
        assert "the peer did not confirm within 0.01 s that it writes to a receive no more" in reason
        assert link.far_events.cancelled in ([], [1])


async def test_a_cancelled_send_is_given_back_once_the_device_reads_it_no_more() -> None:
    size = 100 * FRAME
    target = bytearray(size)
    with mmap.mmap(-1, size) as memory:
        memory[:] = bytes(pattern(size, 1))
        async with rig() as link:
            link.near_events.on_sent = lambda end, send: memory.close()
            link.near.send(1, link.far.post_receive(1, memoryview(target)), 0, memoryview(memory))
            link.fabric.held = True
            await turns()
            link.near.cancel_send(1)
            await turns()
            assert link.near_events.sent_sends == []
            with pytest.raises(ValueError, match="send 1"):
                link.near.send(1, bytes(8), 0, memoryview(b"x"))
            link.fabric.release()
            await link.near_events.until(lambda: link.near_events.sent_sends == [1])
            assert memory.closed
            await _still_works(link)
            came = sum(piece[2] for piece in link.far_events.pieces if piece[0] == 1)
            assert 0 < came <= WINDOW + 2 * FRAME
            for _, offset, nbytes, _ in [piece for piece in link.far_events.pieces if piece[0] == 1]:
                assert target[offset : offset + nbytes] == pattern(size, 1)[offset : offset + nbytes]


async def test_a_send_that_is_cancelled_while_writing_is_given_back_when_the_link_ends() -> None:
    async with rig() as link:
        target = bytearray(100 * FRAME)
        link.near.send(1, link.far.post_receive(1, memoryview(target)), 0, memoryview(pattern(100 * FRAME, 1)))
        link.fabric.held = True
        await turns()
        link.near.cancel_send(1)
        link.far.cancel_receive(1)
        link.near.abort(AgentUnavailable("enough"))
        await link.until_closed()
        assert link.near_events.sent_sends == [1]
        assert link.far_events.cancelled == [1]
        assert link.near_events.order[-1] == "closed"


async def test_a_revoked_token_reaches_nothing_any_more() -> None:
    target = bytearray(4 * FRAME)
    async with rig() as link:
        token = link.far.post_receive(1, memoryview(target))
        link.far.cancel_receive(1)
        await link.far_events.until(lambda: link.far_events.cancelled == [1])
        link.near.send(1, token, 0, memoryview(pattern(4 * FRAME, 1)))
        await link.near_events.until(lambda: link.near_events.sent_sends == [1])
        await turns_until(lambda: link.far.stats.frames_unclaimed == 4)
        assert target == bytearray(4 * FRAME)
        await _still_works(link)


async def test_the_key_of_a_cancelled_receive_opens_nothing_any_more() -> None:
    target = bytearray(4 * FRAME)
    async with rig() as link:
        at_rest = link.fabric.open["region"]
        link.far.post_receive(1, memoryview(target))
        (region,) = [region for region in link.far_pairs[0].domain.regions.values() if region.remote_write]
        link.far.cancel_receive(1)
        await link.far_events.until(lambda: link.far_events.cancelled == [1])
        assert link.fabric.open["region"] == at_rest
        link.forge(b"late", kind=SendKind.WRITE_WITH_IMMEDIATE, key=region.remote_key, address=region.address)
        await link.until_closed()
        assert REFUSED in link.reason(link.near_events)
        assert target == bytearray(4 * FRAME)


async def test_memory_is_registered_no_longer_than_it_is_sent_from_or_received_into() -> None:
    async with rig() as link:
        at_rest = link.fabric.open["region"]
        for k in range(20):
            target = bytearray(2 * FRAME)
            link.near.send(k, link.far.post_receive(k, memoryview(target)), 0, memoryview(pattern(2 * FRAME, k)))
            await link.far_events.until_bytes(k, 2 * FRAME)
            await _until_sent(link, k + 1)
            assert link.fabric.open["region"] == at_rest


async def test_the_token_of_another_link_reaches_nothing() -> None:
    fabric = FakeFabric()
    target = bytearray(4 * FRAME)
    async with rig(fabric) as other:
        async with rig(fabric) as link:
            token = other.far.post_receive(1, memoryview(target))
            link.near.send(1, token, 0, memoryview(pattern(4 * FRAME, 1)))
            await link.near_events.until(lambda: link.near_events.sent_sends == [1])
            await turns_until(lambda: link.far.stats.frames_unclaimed == 4)
            await _still_works(link)
        assert target == bytearray(4 * FRAME)
        assert other.far_events.ends == []
    assert fabric.leaks() == {}


async def test_a_receive_that_is_over_cannot_be_written_again() -> None:
    target = bytearray(2 * FRAME)
    async with rig() as link:
        token = link.far.post_receive(1, memoryview(target))
        link.near.send(1, token, 0, memoryview(pattern(2 * FRAME, 1)))
        await link.far_events.until_bytes(1, 2 * FRAME)
        link.near.send(2, token, 0, memoryview(bytes(2 * FRAME)))
        await link.until_closed()
        assert REFUSED in link.reason(link.near_events)
        assert target == pattern(2 * FRAME, 1)


async def _until_sent(link: Rig, count: int) -> None:
    await link.near_events.until(lambda: len(link.near_events.sent_sends) >= count)


async def _still_works(link: Rig) -> None:
    for k, size in ((900, 10), (901, 3 * FRAME)):
        target = bytearray(size)
        link.near.send(k, link.far.post_receive(k, memoryview(target)), 0, memoryview(pattern(size, k)))
        await link.far_events.until_bytes(k, size)
        assert target == pattern(size, k)


# Failures


@pytest.mark.parametrize(
    ("after", "error"),
    [(0, REFUSED), (0, PROTECTION), (3, NOT_READY), *((after, RETRIES) for after in (0, 1, 2, 3, 5, 8, 13, 21))],
)
async def test_a_request_that_fails_ends_the_link_and_frees_everything(after: int, error: str) -> None:
    size = 20 * FRAME
    async with rig() as link:
        seen = 0

        def before(pair: FakePair, request: SendRequest) -> str:
            nonlocal seen
            seen += 1
            return error if seen > after else ""

        link.fabric.before = before
        for k, end, other in ((1, link.near, link.far), (2, link.far, link.near)):
            end.send(k, other.post_receive(k, memoryview(bytearray(size))), 0, memoryview(bytes(size)))
            end.send(k + 10, other.post_receive(k + 10, memoryview(bytearray(9))), 0, memoryview(bytes(9)))
            other.post_receive(30, memoryview(bytearray(size)))
        await link.until_closed()
        reasons = link.reason(link.near_events), link.reason(link.far_events)
        assert any(error in reason for reason in reasons)
        for events in (link.near_events, link.far_events):
            assert isinstance(events.ends[0], AgentUnavailable)
            assert len(events.sent_sends) == 2
            assert 30 in events.cancelled
            assert events.order[-1] == "closed"
        assert link.fabric.leaks() == {}


async def test_a_queue_pair_that_failed_at_the_other_end_ends_the_link() -> None:
    async with rig() as link:
        link.far_pairs[0].fail()
        await link.until_closed()
        assert "fake0: the queue pair failed" in link.reason(link.far_events)


@pytest.mark.parametrize(
    ("kind", "says"),
    [(AsyncKind.QUEUE_FAILED, "QUEUE_FAILED"), (AsyncKind.PAIR_FAILED, "PAIR_FAILED"), (AsyncKind.OTHER, "")],
)
async def test_events_of_the_device(kind: AsyncKind, says: str) -> None:
    async with rig() as link:
        link.fabric.fail(kind)
        if says:
            await link.until_closed()
            assert says in link.reason(link.near_events)
            assert says in link.reason(link.far_events)
        else:
            await turns()
            await _still_works(link)


async def test_a_device_that_is_removed_ends_the_link_and_a_port_that_goes_down_too() -> None:
    async with rig() as link:
        link.fabric.remove("fake0")
        await link.until_closed()
        assert "the device failed or was removed" in link.reason(link.near_events)
    async with rig() as link:
        link.fabric.port_down("fake0")
        await link.until_closed()
        assert "RDMA by fake0: the port went down" in link.reason(link.near_events)


async def test_another_port_of_the_device_that_goes_down_ends_no_link() -> None:
    async with rig() as link:
        link.fabric.port_down("fake0", 2)
        await turns()
        await _still_works(link)


async def test_a_device_that_is_removed_without_a_word_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a driver that cannot take it away from programs, and waits for them."""
    monkeypatch.setattr(agreement, "_LOOK_EVERY", 0.01)
    async with rig() as link:
        link.far.post_receive(1, memoryview(bytearray(2 * FRAME)))
        link.fabric.remove("fake0", silently=True)
        await link.until_closed()
        reasons = link.reason(link.near_events), link.reason(link.far_events)
        assert any("RDMA by fake0: the device was removed" in reason for reason in reasons)
        assert link.far_events.cancelled == [1]
        assert link.fabric.leaks() == {}


async def test_a_new_link_has_new_queue_pairs() -> None:
    fabric = FakeFabric()
    numbers: list[int] = []
    for _ in range(3):
        async with rig(fabric, near=options("a", 1, flows=3)) as link:
            numbers += [pair.number for pair in (*link.near_pairs, *link.far_pairs)]
            await _still_works(link)
            link.near_pairs[1].fail()
            await link.until_closed()
        assert fabric.leaks() == {}
    assert len(set(numbers)) == 18


# What a peer must not do


def _header(kind: int, length: int = 0, serial: int = 0, offset: int = 0) -> bytes:
    return wire.header(kind, length, serial, offset)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"short", "too short"),
        (bytes(40), "no message"),
        (_header(9), "no message"),
        (_header(wire.MORE) + b"x", "belong to no frame"),
        (_header(wire.FRAME, 0) + b"x", "0 bytes"),
        (_header(wire.FRAME, 1 << 31) + b"x", "are allowed"),
        (_header(wire.FRAME, 2, 1) + b"xyz", "belong to no frame"),
        (_header(wire.ANNOUNCE), "announcement of 32 bytes"),
        (wire.Announcement(5000, 1, 0, 10, 10, 0).pack(), "announcement of"),
        (wire.Announcement(1, 1, 0, 0, 10, 0).pack(), "announcement of 0 bytes"),
    ],
)
async def test_garbage_on_a_data_flow_ends_the_link(data: bytes, says: str) -> None:
    async with rig() as link:
        link.forge(data)
        await link.until_closed()
        assert isinstance(link.far_events.ends[0], ProtocolError)
        assert says in link.reason(link.far_events)
        assert isinstance(link.near_events.ends[0], AgentUnavailable)


async def test_data_behind_the_end_ends_the_link() -> None:
    async with rig() as link:
        link.forge(_header(wire.END))
        link.forge(_header(wire.SKIPPED))
        await link.far_events.until_closed()
        assert "behind the end" in link.reason(link.far_events)


def _write(link: Rig, token: bytes, data: bytes, at: int, immediate: int) -> None:
    target = wire.read_token(token)
    link.forge(
        data, kind=SendKind.WRITE_WITH_IMMEDIATE, immediate=immediate, key=target.key, address=target.address + at
    )


async def test_an_immediate_that_names_no_posted_tile_ends_the_link() -> None:
    target = bytearray(2 * FRAME)
    async with rig() as link:
        token = link.far.post_receive(1, memoryview(target))
        _write(link, token, b"1234", 0, 7 << wire.FRAME_BITS)
        await link.until_closed()
        assert isinstance(link.far_events.ends[0], ProtocolError)
        assert "names no posted tile: 0x00700000" in link.reason(link.far_events)


@pytest.mark.parametrize(
    ("immediate", "length", "says"),
    [(3, 4, "frame 3, which has 0"), (0, 3, "3 bytes as frame 0, which has 4"), (2, 4, "frame 2, which has 2")],
)
async def test_an_immediate_that_was_not_announced_so_ends_the_link(immediate: int, length: int, says: str) -> None:
    async with rig() as link:
        token = link.far.post_receive(1, memoryview(bytearray(2 * FRAME)))
        link.forge(wire.Announcement(0, wire.read_token(token).serial, 0, 10, 4, 0).pack())
        _write(link, token, bytes(length), 0, immediate)
        await link.until_closed()
        assert says in link.reason(link.far_events)


async def test_immediates_may_come_in_any_order_and_each_once() -> None:
    target = bytearray(2 * FRAME)
    async with rig() as link:
        token = link.far.post_receive(1, memoryview(target))
        link.forge(wire.Announcement(3, wire.read_token(token).serial, 100, 10, 4, 77).pack())
        for frame, data in ((2, b"89"), (0, b"0123"), (1, b"4567")):
            _write(link, token, data, 100 + 4 * frame, 3 << wire.FRAME_BITS | frame)
        await link.far_events.until_bytes(1, 10)
        assert target[100:110] == b"0123456789"
        assert link.far_events.pieces == [(1, 108, 2, 77), (1, 100, 4, 77), (1, 104, 4, 77)]
        _write(link, token, b"4567", 104, 3 << wire.FRAME_BITS | 1)
        await link.until_closed()
        assert "bytes 104 to 108 of receive 1 came twice" in link.reason(link.far_events)


async def test_a_key_for_memory_that_was_never_posted_writes_nothing() -> None:
    fabric = FakeFabric()
    theirs = bytearray(2 * FRAME)
    async with rig(fabric) as other, rig(fabric) as link:
        foreign = wire.read_token(other.far.post_receive(1, memoryview(theirs)))
        target = memoryview(bytearray(2 * FRAME))
        own = wire.read_token(link.far.post_receive(1, target))
        forged = replace(own, key=foreign.key, address=foreign.address).pack()
        link.near.send(1, forged, 0, memoryview(pattern(2 * FRAME, 1)))
        await link.until_closed()
        assert REFUSED in link.reason(link.near_events)
        assert theirs == target == bytearray(2 * FRAME)
        assert other.far_events.ends == []
    assert fabric.leaks() == {}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"", "unknown message"),
        (b"\x01", "unknown message"),
        (b"\x09" + bytes(8), "unknown message"),
        (wire.Credit(5, 1).pack(), "credits for flow 5 of 1"),
        (wire.Credit(0, 0).pack(), "0 credits"),
        (wire.Credit(0, 1000).pack(), "1000 credits"),
    ],
)
async def test_bad_messages_between_the_ends_end_the_link(message: bytes, says: str) -> None:
    async with rig() as link:
        near = link.near
        assert isinstance(near, rdma_link.RdmaLink)
        near.send_carrier(message)
        await link.until_closed()
        assert isinstance(link.far_events.ends[0], ProtocolError)
        assert says in link.reason(link.far_events)


async def test_an_answer_that_nobody_waits_for_is_harmless() -> None:
    async with rig() as link:
        near = link.near
        assert isinstance(near, rdma_link.RdmaLink)
        near.send_carrier(wire.Revoked(77).pack())
        near.send_carrier(wire.Revoke(78).pack())
        await _still_works(link)


async def test_more_announcements_than_a_flow_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "ANNOUNCEMENTS", 4)
    size = 6 * FRAME
    async with rig() as link:
        targets = [bytearray(size) for _ in range(12)]
        for k, target in enumerate(targets):
            link.near.send(k, link.far.post_receive(k, memoryview(target)), 0, memoryview(pattern(size, k)))
        await link.far_events.until(lambda: len(link.far_events.pieces) == 72)
        assert all(target == pattern(size, k) for k, target in enumerate(targets))
        assert link.far.stats.bytes_copied == 0


async def test_a_send_of_more_frames_than_an_announcement_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAMES", 4)
    size = 30 * FRAME + 12_345
    target = bytearray(size)
    async with rig() as link:
        link.near.send(1, link.far.post_receive(1, memoryview(target)), 0, memoryview(pattern(size, 1)))
        await link.far_events.until_bytes(1, size)
        assert target == pattern(size, 1)


async def test_a_link_that_nobody_started_can_be_ended() -> None:
    async with rig() as link:
        assert link.near.data_path.startswith("rdma fake0 port 1, GID 0 (127.0.0.1, RoCE v2), MTU 4096")
        assert link.near.fallback_reason == ""
        events = Recorder()
        assert events.count() == 0
        await asyncio.wait_for(link.near.close(5), 20)
        await link.far_events.until_closed()
        assert link.near_events.ends == link.far_events.ends == [None]
