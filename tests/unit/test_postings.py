"""Which bytes may land in a posted receive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allreduced.core.errors import ProtocolError
from allreduced.transports.postings import Posting, Postings, serial_of, token_of


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=40))
def test_each_byte_is_claimed_once(frames: list[tuple[int, int]]) -> None:
    """Against a model that keeps one flag per byte."""
    posting = Posting(7, 1, memoryview(bytearray(40)))
    taken: set[int] = set()
    for offset, length in frames:
        wanted = set(range(offset, offset + length))
        if offset + length > 40 or wanted & taken:
            with pytest.raises(ProtocolError, match="receive 7"):
                posting.claim(offset, length)
        else:
            posting.claim(offset, length)[:] = bytes([1]) * length
            taken |= wanted
    assert {k for k, byte in enumerate(posting.view) if byte} == taken


def test_serials_are_never_used_twice() -> None:
    postings = Postings()
    serials = set()
    for _ in range(5):
        posting = postings.post(3, memoryview(bytearray(4)))
        serials.add(posting.serial)
        assert postings.find(posting.serial) is posting
        assert postings.cancel(3) is posting
        assert postings.find(posting.serial) is None
    assert len(serials) == 5
    assert postings.cancel(3) is None
    assert len(postings) == 0


def test_tokens_carry_the_serial() -> None:
    assert serial_of(token_of((1 << 64) - 1)) == (1 << 64) - 1
    with pytest.raises(ProtocolError, match="7 bytes"):
        serial_of(bytes(7))
