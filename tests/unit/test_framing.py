from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allreduced.core.errors import ProtocolError
from allreduced.protocol.framing import MessageReader

BODIES = [b"a", b"bc" * 100, b"\0" * 3, b"d" * 1000]


def framed(*bodies: bytes) -> bytes:
    return b"".join(len(body).to_bytes(4, "little") + body for body in bodies)


STREAM = framed(*BODIES)


@pytest.fixture
def reader() -> MessageReader:
    return MessageReader(1000)


def test_bodies_come_whole(reader: MessageReader) -> None:
    assert reader.feed(STREAM) == BODIES
    assert not reader.pending


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 64, 1001])
def test_bodies_come_in_pieces_of_any_size(reader: MessageReader, size: int) -> None:
    bodies = []
    for start in range(0, len(STREAM), size):
        bodies += reader.feed(STREAM[start : start + size])
    assert bodies == BODIES
    assert not reader.pending


@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(bodies=st.lists(st.binary(min_size=1, max_size=40), max_size=6), cuts=st.lists(st.integers(1, 30), min_size=1))
def test_bodies_do_not_depend_on_the_pieces(bodies: list[bytes], cuts: list[int]) -> None:
    reader = MessageReader(40)
    stream = framed(*bodies)
    found, start, turn = [], 0, 0
    while start < len(stream):
        stop = start + cuts[turn % len(cuts)]
        found += reader.feed(memoryview(stream)[start:stop])
        start, turn = stop, turn + 1
    assert found == bodies
    assert not reader.pending


def test_a_body_is_there_with_its_last_byte(reader: MessageReader) -> None:
    assert reader.feed(framed(b"abc")[:-1]) == []
    assert reader.pending
    assert reader.feed(b"c") == [b"abc"]
    assert not reader.pending


def test_trailing_bytes_wait_for_their_rest(reader: MessageReader) -> None:
    assert reader.feed(STREAM + framed(b"later")[:6]) == BODIES
    assert reader.pending
    assert reader.feed(framed(b"later")[6:] + framed(b"last")) == [b"later", b"last"]
    assert not reader.pending


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_cut_in_the_length_is_pending(reader: MessageReader, cut: int) -> None:
    assert reader.feed(framed(b"abc")[:cut]) == []
    assert reader.pending


def test_bodies_do_not_share_memory_with_the_input(reader: MessageReader) -> None:
    data = bytearray(framed(b"abc"))
    [body] = reader.feed(data)
    data[4:] = b"xyz"
    assert body == b"abc"


def test_nothing_comes_of_nothing(reader: MessageReader) -> None:
    assert reader.feed(b"") == []
    assert not reader.pending


@pytest.mark.parametrize("length", [0, 1001, 0xFFFFFFFF])
def test_a_bad_length_is_refused_before_any_body(length: int) -> None:
    header = length.to_bytes(4, "little")
    for pieces in ([header], [header[:3], header[3:]], [framed(b"ok") + header], [framed(b"o")[:-1], b"k" + header]):
        reader = MessageReader(1000)
        for piece in pieces[:-1]:
            assert reader.feed(piece) == []
        with pytest.raises(ProtocolError, match=f"a length of {length} bytes, 1 to 1000 are allowed"):
            reader.feed(pieces[-1])
        with pytest.raises(ProtocolError, match="1 to 1000"):
            reader.feed(framed(b"ok"))
        assert not reader.pending


def test_the_longest_body_is_allowed(reader: MessageReader) -> None:
    assert reader.feed(framed(b"x" * 1000)) == [b"x" * 1000]


def test_an_endless_message_holds_no_more_than_came(reader: MessageReader) -> None:
    reader.feed((1000).to_bytes(4, "little"))
    for _ in range(999):
        assert reader.feed(b"x") == []
        assert reader.pending
    [body] = reader.feed(b"x" * 3)
    assert len(body) == 1000
    with pytest.raises(ProtocolError):  # what follows is a new message: "xx.." is a length that is too long
        reader.feed(b"xx")
