"""The receives that one end of a link has posted, and what may land in them."""

from __future__ import annotations

import itertools
import secrets
import struct
from bisect import bisect_right
from collections.abc import Iterator

from allreduced.core.errors import ProtocolError

_TOKEN = struct.Struct("<Q")
_serials = itertools.count(1 + secrets.randbits(62))
"""Of all links of this process: a token that was given on a link that is gone must reach nothing on another one, also
where that is one to the agent's next start."""


def flat(buffer: memoryview) -> memoryview:
    """Return a new view of the same memory as plain bytes.

    :raises TypeError: the memory is not C-contiguous.
    """
    if not buffer.nbytes:
        return memoryview(b"")  # memoryview cannot cast shapes with zeros
    return buffer.cast("B")


def token_of(serial: int) -> bytes:
    """Return the token that names the posting ``serial``."""
    return _TOKEN.pack(serial)


def serial_of(token: bytes) -> int:
    """Return what :func:`token_of` was given.

    :raises ProtocolError: the bytes are no such token.
    """
    if len(token) != _TOKEN.size:
        raise ProtocolError(f"a token of {len(token)} bytes does not name a receive of this link")
    serial: int = _TOKEN.unpack(token)[0]
    return serial


class Posting:
    """One posted receive. ``serial`` is never used twice, whatever number the owner chose.

    So a late frame of a cancelled receive, or of one on an earlier link, cannot land in a new one of the same number.
    """

    __slots__ = ("_claimed", "cancelled", "in_flight", "landed", "receive", "serial", "size", "view")

    def __init__(self, receive: int, serial: int, view: memoryview) -> None:
        self.receive = receive
        self.serial = serial
        self.view = view
        self.size = len(view)
        self.landed = 0
        self.in_flight = 0
        """Frames that are being written into the memory now."""
        self.cancelled = False
        self._claimed: list[list[int]] = []
        """Disjoint ascending [start, end) of the bytes that came or are coming; neighbours are merged."""

    def claim(self, offset: int, length: int) -> memoryview:
        """Set bytes aside for one frame and return where it goes.

        :raises ProtocolError: it would leave the buffer, or those bytes came already.
        """
        end = offset + length
        if end > self.size:
            raise ProtocolError(
                f"a data frame for bytes {offset} to {end} of receive {self.receive}, which has {self.size}"
            )
        ranges = self._claimed
        at = bisect_right(ranges, [offset, self.size + 1])
        if (at and ranges[at - 1][1] > offset) or (at < len(ranges) and ranges[at][0] < end):
            raise ProtocolError(f"bytes {offset} to {end} of receive {self.receive} came twice")
        if at and ranges[at - 1][1] == offset:
            ranges[at - 1][1] = end
            if at < len(ranges) and ranges[at][0] == end:
                ranges[at - 1][1] = ranges.pop(at)[1]
        elif at < len(ranges) and ranges[at][0] == end:
            ranges[at][0] = offset
        else:
            ranges.insert(at, [offset, end])
        self.in_flight += 1
        return self.view[offset:end]


class Postings:
    """All postings of one end of a link, by the owner's number and by serial."""

    def __init__(self) -> None:
        self._by_serial: dict[int, Posting] = {}
        self._by_receive: dict[int, Posting] = {}

    def __iter__(self) -> Iterator[Posting]:
        return iter(self._by_serial.values())

    def __len__(self) -> int:
        return len(self._by_serial)

    def post(self, receive: int, buffer: memoryview) -> Posting:
        """Open ``buffer``; an empty one is over at once.

        :raises ValueError: the number is in use, or the buffer is read-only.
        """
        if receive in self._by_receive:
            raise ValueError(f"receive {receive} is posted already")
        if buffer.readonly:
            raise ValueError(f"the buffer of receive {receive} is read-only")
        posting = Posting(receive, next(_serials), flat(buffer))
        if posting.size:
            self._by_receive[receive] = self._by_serial[posting.serial] = posting
        return posting

    def find(self, serial: int) -> Posting | None:
        """Return the posting that a frame names, unless it is over or cancelled."""
        return self._by_serial.get(serial)

    def landed(self, posting: Posting, length: int) -> None:
        """Take note that a claimed frame is complete. The posting ends, and lets its memory go, with its last byte."""
        posting.in_flight -= 1
        posting.landed += length
        if posting.landed == posting.size:
            self._remove(posting)
            posting.view.release()

    def cancel(self, receive: int) -> Posting | None:
        """Close a posting to further frames and return it, or None. Frames in flight are the caller's business."""
        posting = self._by_receive.get(receive)
        if posting is not None:
            self._remove(posting)
            posting.cancelled = True
        return posting

    def clear(self) -> list[int]:
        """Close all postings and return their numbers; nothing may be in flight any more."""
        numbers = list(self._by_receive)
        for posting in self._by_serial.values():
            posting.view.release()
        self._by_serial.clear()
        self._by_receive.clear()
        return numbers

    def _remove(self, posting: Posting) -> None:
        del self._by_serial[posting.serial]
        del self._by_receive[posting.receive]
