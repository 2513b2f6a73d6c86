"""A TCP link against a peer that cuts, forges and withholds frames."""

from __future__ import annotations

import asyncio
import socket
import struct
from itertools import count, pairwise

import pytest
from tests.contract.conftest import BOUND, pattern
from tests.unit.raw_peer import (
    SECRET,
    listening,
    open_socket,
    raw_link,
    read,
    read_to_end,
    turns_until,
    write,
)

from allreduced.core.errors import AgentUnavailable, ProtocolError
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports import postings
from allreduced.transports.base import MAX_CONTROL, MAX_FRAME
from allreduced.transports.tcp import wire
from allreduced.transports.tcp.data import FRAMES_PER_WAKE


def _serial(token: bytes) -> int:
    return int.from_bytes(token, "little")


def _data(serial: int, offset: int, payload: bytes, tag: int = 0) -> bytes:
    return wire.data_header(wire.PAYLOAD, len(payload), serial, offset, tag) + payload


def _control(payload: bytes) -> bytes:
    return wire.control_header(wire.PAYLOAD, len(payload)) + payload


async def test_frames_may_come_byte_by_byte() -> None:
    target = bytearray(10)
    async with raw_link() as raw:
        serial = _serial(raw.link.post_receive(1, memoryview(target)))
        for byte in _control(b"hello") + _control(b""):
            await write(raw.control, bytes([byte]))
        for byte in _data(serial, 4, b"456789", tag=7) + _data(serial, 0, b"0123"):
            await write(raw.data[0], bytes([byte]))
        await raw.events.until_control([b"hello", b""])
        await raw.events.until_bytes(1, 10)
        assert target == b"0123456789"
        assert raw.events.pieces == [(1, 4, 6, 7), (1, 0, 4, 0)]


async def test_bytes_right_behind_the_handshake_are_not_lost() -> None:
    a = SecretAuthenticator("a", 1, SECRET)
    async with listening() as (listener, queue):
        sockets = []
        handshakes = []  # the first keeps the session
        session = b""
        for flow, early in ((0, _control(b"early")), (1, _data(77, 0, b"nobody asked"))):
            handshake = a.dial(session, flow, 1)
            sock = await open_socket(listener.address)
            sockets.append(sock)
            await write(sock, handshake.start())
            proof = b""
            while not proof:
                proof = handshake.receive(await asyncio.get_running_loop().sock_recv(sock, 512))
            await write(sock, proof + early)
            while not handshake.finished:
                handshake.receive(await asyncio.get_running_loop().sock_recv(sock, 512))
            session = handshake.session
            handshakes.append(handshake)
        link, events = await queue.get()
        await events.until_control([b"early"])
        await turns_until(lambda: link.stats.frames_unclaimed == 1)
        assert [handshake.flow for handshake in handshakes] == [0, 1]
        for sock in sockets:
            sock.close()


async def test_a_flow_moves_few_frames_before_others_get_the_loop() -> None:
    frames = 400
    seen = [0]
    async with raw_link() as raw:
        serial = _serial(raw.link.post_receive(1, memoryview(bytearray(frames))))
        loop = asyncio.get_running_loop()

        def turn() -> None:
            seen.append(len(raw.events.pieces))
            if seen[-1] < frames:
                loop.call_soon(turn)

        loop.call_soon(turn)
        await write(raw.data[0], b"".join(_data(serial, k, b"x") for k in range(frames)))
        await turns_until(lambda: seen[-1] == frames)
        assert max(after - before for before, after in pairwise(seen)) <= FRAMES_PER_WAKE


async def test_cancel_of_a_receive_in_the_middle_of_a_frame() -> None:
    target, after = bytearray(50_000), bytearray(5)
    payload = bytes(pattern(50_000, 1))
    async with raw_link() as raw:
        serial = _serial(raw.link.post_receive(1, memoryview(target)))
        frame = _data(serial, 0, payload)
        await write(raw.data[0], frame[:20_000])
        came = 20_000 - wire.DATA_HEADER
        await turns_until(lambda: target[:came] == payload[:came])
        raw.link.cancel_receive(1)
        assert raw.events.count() == 0
        await raw.events.until(lambda: raw.events.cancelled == [1])
        kept = bytes(target)
        other = _serial(raw.link.post_receive(2, memoryview(after)))
        await write(raw.data[0], frame[20_000:] + _data(other, 0, b"after"))
        await raw.events.until_bytes(2, 5)
        assert bytes(target) == kept == payload[:came] + bytes(50_000 - came)
        assert after == b"after"
        assert raw.link.stats.frames_unclaimed == 1
        assert raw.events.cancelled == [1]
        assert raw.events.nbytes(1) == 0


async def test_cancel_of_a_receive_in_its_header_and_twice_in_flight() -> None:
    """Two flows are in the middle of frames for one receive, a third has half a header."""
    target = bytearray(30_000)
    async with raw_link(flows=3) as raw:
        serial = _serial(raw.link.post_receive(1, memoryview(target)))
        frames = [_data(serial, k * 10_000, bytes(pattern(10_000, k + 1))) for k in range(3)]
        cuts = [5_000, 6_000, 9]
        for sock, frame, cut in zip(raw.data, frames, cuts, strict=True):
            await write(sock, frame[:cut])
        await turns_until(
            lambda: target[4_967] == pattern(5000, 1)[4_967] and target[15_967] == pattern(6000, 2)[5_967]
        )
        raw.link.cancel_receive(1)
        await raw.events.until(lambda: raw.events.cancelled == [1])
        kept = bytes(target)
        for sock, frame, cut in zip(raw.data, frames, cuts, strict=True):
            await write(sock, frame[cut:])
        await turns_until(lambda: raw.link.stats.frames_unclaimed == 3)
        assert bytes(target) == kept
        assert raw.events.order == ["receive_cancelled"]


async def test_cancel_of_a_send_in_the_middle_of_a_frame() -> None:
    size = 32 << 20  # more than the kernel takes on both sides
    source = pattern(size, 3)
    async with raw_link(receive_buffer=4096, max_frame=size) as raw:
        raw.link.send(1, (5).to_bytes(8, "little"), 64, memoryview(source), tag=9)
        raw.link.send(2, (6).to_bytes(8, "little"), 0, memoryview(b"next"))
        header = await read(raw.data[0], wire.DATA_HEADER)
        assert header == wire.data_header(wire.PAYLOAD, size, 5, 64, 9)
        assert raw.events.count() == 0
        raw.link.cancel_send(1)
        await raw.events.until(lambda: raw.events.sent_sends == [1])
        source[:] = bytes(size)
        assert await read(raw.data[0], size) == pattern(size, 3)
        assert await read(raw.data[0], wire.DATA_HEADER + 4) == _data(6, 0, b"next")
        await raw.events.until(lambda: raw.events.sent_sends == [1, 2])


async def test_an_urgent_send_waits_for_one_frame_at_most() -> None:
    frame = 32 << 20
    async with raw_link(receive_buffer=4096, max_frame=frame) as raw:
        raw.link.send(1, (5).to_bytes(8, "little"), 0, memoryview(bytes(3 * frame)))
        await read(raw.data[0], wire.DATA_HEADER)
        raw.link.send(2, (6).to_bytes(8, "little"), 0, memoryview(b"now"), priority=1)
        await read(raw.data[0], frame)
        assert await read(raw.data[0], wire.DATA_HEADER + 3) == _data(6, 0, b"now")
        raw.link.abort(AgentUnavailable("a peer that does not read cannot hold this up"))
        await raw.events.until_closed()
        assert sorted(raw.events.sent_sends) == [1, 2]


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"x" * wire.DATA_HEADER, "no data frame"),
        (wire.data_header(wire.PAYLOAD, 0, 1, 0, 0), "no data frame"),
        (wire.data_header(wire.END, 1, 0, 0, 0), "no data frame"),
        (wire.data_header(wire.BYE, 0, 0, 0, 0), "no data frame"),
        (wire.data_header(wire.PAYLOAD, MAX_FRAME + 1, 1, 0, 0), f"{MAX_FRAME + 1} bytes, {MAX_FRAME} are allowed"),
        (wire.data_header(wire.PAYLOAD, 5, 1, 6, 0), "bytes 6 to 11 of receive 1, which has 10"),
        (wire.data_header(wire.PAYLOAD, 5, 1, (1 << 64) - 1, 0), "which has 10"),
        (wire.data_header(wire.END, 0, 0, 0, 0) * 2, "behind the end"),
    ],
)
async def test_bad_data_frames_end_the_link(frame: bytes, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postings, "_serials", count(1))
    target = bytearray(10)
    async with raw_link() as raw:
        assert _serial(raw.link.post_receive(1, memoryview(target))) == 1
        await write(raw.data[0], frame)
        await raw.events.until_closed()
        error = raw.events.ends[0]
        assert isinstance(error, ProtocolError)
        assert says in error.message
        assert "node 'a' at tcp://127.0.0.1:" in error.message
        assert raw.events.order == ["receive_cancelled", "closed"]
        assert target == bytes(10)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"x" * wire.CONTROL_HEADER, "no control frame"),
        (wire.control_header(3, 0), "no control frame"),
        (wire.control_header(wire.END, 1), "no control frame"),
        (wire.control_header(wire.PAYLOAD, MAX_CONTROL + 1), f"{MAX_CONTROL} are allowed"),
        (wire.control_header(wire.BYE, 0), "a goodbye before the end"),
        (wire.control_header(wire.END, 0) * 2, "behind the end"),
        (wire.control_header(wire.END, 0) + _control(b"more"), "behind the end"),
    ],
)
async def test_bad_control_frames_end_the_link(frame: bytes, says: str) -> None:
    async with raw_link() as raw:
        await write(raw.control, frame)
        await raw.events.until_closed()
        error = raw.events.ends[0]
        assert isinstance(error, ProtocolError)
        assert says in error.message
        assert raw.events.control == []


@pytest.mark.parametrize("flow", [0, 1, 2])
@pytest.mark.parametrize("how", ["end", "reset", "half"])
async def test_one_dead_flow_ends_the_link(flow: int, how: str) -> None:
    async with raw_link(flows=2) as raw:
        raw.link.post_receive(1, memoryview(bytearray(10)))
        sock = [raw.control, *raw.data][flow]
        if how == "half":
            sock.shutdown(socket.SHUT_WR)
        elif how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        else:
            sock.close()
        await raw.events.until_closed()
        error = raw.events.ends[0]
        assert isinstance(error, AgentUnavailable)
        assert "the link to node 'a' at tcp://127.0.0.1:" in error.message
        assert raw.events.order == ["receive_cancelled", "closed"]
        for other in (raw.control, *raw.data):
            if other.fileno() >= 0:
                assert await read_to_end(other) == b""


async def test_the_end_in_the_middle_of_a_frame() -> None:
    target = bytearray(100)
    async with raw_link() as raw:
        serial = _serial(raw.link.post_receive(1, memoryview(target)))
        await write(raw.data[0], _data(serial, 0, bytes(100))[:50])
        raw.data[0].close()
        await raw.events.until_closed()
        assert raw.events.order == ["receive_cancelled", "closed"]


async def test_a_peer_that_does_not_read_control_frames_loses_the_link() -> None:
    async with raw_link(receive_buffer=4096) as raw:
        for _ in range(70):
            raw.link.send_control(bytes(MAX_CONTROL))
        await raw.events.until_closed()
        error = raw.events.ends[0]
        assert isinstance(error, AgentUnavailable)
        assert "does not read its control frames" in error.message


async def test_close_is_given_up_when_the_peer_does_not_take_everything() -> None:
    size = 32 << 20
    async with raw_link(receive_buffer=4096) as raw:
        raw.link.send(1, (1).to_bytes(8, "little"), 0, memoryview(bytes(size)))
        await raw.link.close(0.05)
        error = raw.events.ends[0]
        assert isinstance(error, AgentUnavailable)
        assert "within the 0.05 s for closing" in error.message
        assert raw.events.order == ["sent", "closed"]


async def test_a_cancelled_close_aborts() -> None:
    async with raw_link() as raw:
        closing = asyncio.ensure_future(raw.link.close(BOUND))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await raw.events.until_closed()
        assert isinstance(raw.events.ends[0], AgentUnavailable)


async def test_the_orderly_end_on_the_wire() -> None:
    """Both sides end each flow; the goodbye comes when everything has arrived, and only then."""
    data_end, control_end, bye = (
        wire.data_header(wire.END, 0, 0, 0, 0),
        wire.control_header(wire.END, 0),
        wire.control_header(wire.BYE, 0),
    )
    async with raw_link(flows=2) as raw:
        raw.link.send_control(b"last")
        closing = asyncio.ensure_future(raw.link.close(BOUND))
        assert await read(raw.control, wire.CONTROL_HEADER * 2 + 4) == _control(b"last") + control_end
        for sock in raw.data:
            assert await read(sock, wire.DATA_HEADER) == data_end
        await write(raw.control, _control(b"mine") + control_end)
        await write(raw.data[0], data_end)
        raw.data[0].shutdown(socket.SHUT_WR)  # a flow may end once it said so
        await raw.events.until_control([b"mine"])
        await write(raw.data[1], data_end)
        assert await read(raw.control, wire.CONTROL_HEADER) == bye
        assert not closing.done()
        assert raw.events.ends == []
        await write(raw.control, bye)
        await closing
        assert raw.events.ends == [None]
        assert await read_to_end(raw.control) == b""
