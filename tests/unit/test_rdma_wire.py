"""Tokens, announcements and immediates of RDMA links."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from allreduced.core.errors import ProtocolError
from allreduced.protocol.peer import MAX_TOKEN
from allreduced.transports.rdma import wire
from allreduced.transports.rdma.wire import Announcement, Token

U64 = st.integers(0, (1 << 64) - 1)


@given(U64, U64, U64, U64, st.integers(0, (1 << 32) - 1))
def test_tokens_survive_the_wire(serial: int, link: int, size: int, address: int, key: int) -> None:
    address = min(address, (1 << 64) - size)
    assume(address < 1 << 64)
    token = Token(serial, link, size, address, key)
    assert wire.read_token(token.pack()) == token
    assert len(token.pack()) <= MAX_TOKEN


def test_memory_beyond_the_last_address_is_refused() -> None:
    last = (1 << 64) - 4096
    assert wire.read_token(Token(1, 2, 4096, last, 3).pack()).address == last
    with pytest.raises(ProtocolError, match="4097 bytes at address 0xfffffffffffff000 goes beyond the last address"):
        wire.read_token(Token(1, 2, 4097, last, 3).pack())


@pytest.mark.parametrize("length", [0, 1, 7, 9, 35, 37, 256])
def test_other_bytes_are_no_token(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"{length} bytes"):
        wire.read_token(bytes(length))


def test_a_bare_serial_is_of_no_link() -> None:
    assert wire.read_token((77).to_bytes(8, "little")) == Token(77, 0)


@given(
    st.integers(0, wire.ANNOUNCEMENTS - 1),
    st.integers(0, 1 << 40),
    st.integers(1, 1 << 34),
    st.integers(8193, 4 << 20),
    st.integers(0, wire.MAX_FRAMES - 1),
)
def test_every_frame_of_a_send_has_an_immediate(number: int, base: int, total: int, frame: int, index: int) -> None:
    announcement = Announcement(number, 5, base, total, frame, 9)
    assert wire.read_announcement(memoryview(announcement.pack())) == announcement
    index = min(index, (total - 1) // frame)
    offset, length = base + index * frame, min(frame, total - index * frame)
    assert announcement.covers(offset, length)
    immediate = announcement.immediate(offset)
    assert 0 <= immediate < 1 << 32
    assert immediate >> wire.FRAME_BITS == number
    assert announcement.offset_of(immediate, length) == offset


def test_frames_that_an_announcement_does_not_cover() -> None:
    announcement = Announcement(1, 5, 100, 25, 10, 0)
    assert announcement.covers(120, 5)
    assert not announcement.covers(120, 10)
    assert not announcement.covers(105, 10)
    assert not announcement.covers(90, 10)
    assert not announcement.covers(130, 5)
    assert not Announcement(1, 5, 0, 1 << 60, 1 << 10, 0).covers(wire.MAX_FRAMES << 10, 1 << 10)


@pytest.mark.parametrize("message", [wire.Credit(3, 77), wire.Revoke(1 << 63), wire.Revoked(5)])
def test_messages_between_the_ends(message: wire.Credit | wire.Revoke | wire.Revoked) -> None:
    assert wire.read_carrier(message.pack()) == message
    with pytest.raises(ProtocolError):
        wire.read_carrier(message.pack() + b"\0")
    with pytest.raises(ProtocolError):
        wire.read_carrier(message.pack()[:-1])
