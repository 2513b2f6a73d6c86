"""What RDMA links say to each other: headers of SENDs, immediates, tokens, and messages on the control flow.

Little-endian. A frame of a send is either small and travels in SENDs behind a header, or it is written straight into
the posted memory: then an ANNOUNCE tells once per send and flow what the following immediates mean. An immediate is
``announcement << 20 | frame``: the number of the announcement, and which of its frames landed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from allreduced.core.errors import ProtocolError

_MAGIC: Final = 0xA1DB

FRAME: Final = 0
"""The beginning of a frame whose payload follows in this and in MORE messages."""
MORE: Final = 1
ANNOUNCE: Final = 2
SKIPPED: Final = 3
"""A frame that is not sent, because its receive was cancelled meanwhile."""
END: Final = 4
PROBE: Final = 5
"""The first message in each direction: as long as a packet may be, with bytes of no meaning."""

_HEADER = struct.Struct("<HBBIQQQ")  # magic, kind, 0, length, posting, offset, tag
_ANNOUNCE = struct.Struct("<HBBIQQQQH")  # as above, length is that of a frame; then bytes of the send, number

HEADER: Final = _HEADER.size
ANNOUNCE_SIZE: Final = _ANNOUNCE.size

FRAME_BITS: Final = 20
MAX_FRAMES: Final = 1 << FRAME_BITS
"""Frames that one announcement covers at most."""
ANNOUNCEMENTS: Final = 1 << (32 - FRAME_BITS)
"""Announcements that a flow remembers; then the oldest is replaced."""

_TOKEN = struct.Struct("<QQQQI")  # serial, link, bytes, address, key
_ADDRESSES = 1 << 64
_BARE_TOKEN = struct.Struct("<Q")

_CREDIT, _REVOKE, _REVOKED = 1, 2, 3
_CREDIT_BODY = struct.Struct("<BHI")
_SERIAL_BODY = struct.Struct("<BQ")


@dataclass(frozen=True, slots=True)
class Token:
    """What a sender needs to reach a posted receive. ``key`` 0: not writable remotely, all of it goes by SEND."""

    serial: int
    link: int
    size: int = 0
    address: int = 0
    key: int = 0

    def pack(self) -> bytes:
        """Return it as bytes."""
        return _TOKEN.pack(self.serial, self.link, self.size, self.address, self.key)


def read_token(data: bytes) -> Token:
    """Return what :meth:`Token.pack` was called on. A bare serial, as ended links give it, is one of no link.

    :raises ProtocolError: the bytes are no token.
    """
    if len(data) == _BARE_TOKEN.size:
        return Token(_BARE_TOKEN.unpack(data)[0], 0)
    if len(data) != _TOKEN.size:
        raise ProtocolError(f"a token of {len(data)} bytes does not name a receive of this link")
    token = Token(*_TOKEN.unpack(data))
    if token.address + token.size > _ADDRESSES:
        raise ProtocolError(f"a token of {token.size} bytes at address {token.address:#x} goes beyond the last address")
    return token


@dataclass(frozen=True, slots=True)
class Announcement:
    """What the immediates of one send on one flow mean."""

    number: int
    serial: int
    base: int
    """Offset of frame 0 in the receive."""
    total: int
    """Bytes from there on."""
    frame: int
    """Bytes of each frame but the last."""
    tag: int

    def pack(self) -> bytes:
        """Return the message."""
        return _ANNOUNCE.pack(
            _MAGIC, ANNOUNCE, 0, self.frame, self.serial, self.base, self.tag, self.total, self.number
        )

    def immediate(self, offset: int) -> int:
        """Return the immediate of the frame at ``offset`` of the receive."""
        return self.number << FRAME_BITS | (offset - self.base) // self.frame

    def covers(self, offset: int, length: int) -> bool:
        """Tell whether an immediate can name the frame of ``length`` bytes at ``offset``."""
        index, rest = divmod(offset - self.base, self.frame)
        return not rest and 0 <= index < MAX_FRAMES and length == min(self.frame, self.total - index * self.frame)

    def offset_of(self, immediate: int, length: int) -> int:
        """Return where the frame of an immediate lies in the receive.

        :raises ProtocolError: there is no such frame, or it has another length.
        """
        index = immediate & (MAX_FRAMES - 1)
        expected = min(self.frame, self.total - index * self.frame)
        if length != expected or length <= 0:
            raise ProtocolError(f"an immediate for {length} bytes as frame {index}, which has {max(expected, 0)}")
        return self.base + index * self.frame


def header(kind: int, length: int = 0, serial: int = 0, offset: int = 0, tag: int = 0) -> bytes:
    """Return the header of a message that is no announcement."""
    return _HEADER.pack(_MAGIC, kind, 0, length, serial, offset, tag)


def read_header(data: memoryview) -> tuple[int, int, int, int, int]:
    """Return kind, length, serial, offset and tag of a message.

    :raises ProtocolError: it is none.
    """
    if len(data) < HEADER:
        raise ProtocolError(f"a message of {len(data)} bytes on a data flow, which is too short")
    magic, kind, zero, length, serial, offset, tag = _HEADER.unpack_from(data)
    if magic != _MAGIC or zero or kind > PROBE:
        raise ProtocolError("bytes on a data flow that are no message")
    return kind, length, serial, offset, tag


def read_announcement(data: memoryview) -> Announcement:
    """Return the announcement of a message of that kind.

    :raises ProtocolError: it makes no sense.
    """
    if len(data) != ANNOUNCE_SIZE:
        raise ProtocolError(f"an announcement of {len(data)} bytes")
    _, _, _, frame, serial, base, tag, total, number = _ANNOUNCE.unpack(data)
    if not frame or not total or number >= ANNOUNCEMENTS or base + total >= 1 << 64:
        raise ProtocolError(f"an announcement of {total} bytes in frames of {frame}")
    return Announcement(number, serial, base, total, frame, tag)


@dataclass(frozen=True, slots=True)
class Credit:
    """The receiver of a flow has posted so many receive requests again."""

    flow: int
    count: int

    def pack(self) -> bytes:
        """Return the message."""
        return _CREDIT_BODY.pack(_CREDIT, self.flow, self.count)


@dataclass(frozen=True, slots=True)
class Revoke:
    """The receiver wants to close a receive: no write to it may begin any more."""

    serial: int

    def pack(self) -> bytes:
        """Return the message."""
        return _SERIAL_BODY.pack(_REVOKE, self.serial)


@dataclass(frozen=True, slots=True)
class Revoked:
    """No write to a revoked receive is on its way, and none will come."""

    serial: int

    def pack(self) -> bytes:
        """Return the message."""
        return _SERIAL_BODY.pack(_REVOKED, self.serial)


def read_carrier(data: bytes) -> Credit | Revoke | Revoked:
    """Return a message of the control flow.

    :raises ProtocolError: it is none.
    """
    kind = data[0] if data else 0
    if kind == _CREDIT and len(data) == _CREDIT_BODY.size:
        _, flow, count = _CREDIT_BODY.unpack(data)
        return Credit(flow, count)
    if kind in (_REVOKE, _REVOKED) and len(data) == _SERIAL_BODY.size:
        serial: int = _SERIAL_BODY.unpack(data)[1]
        return Revoke(serial) if kind == _REVOKE else Revoked(serial)
    raise ProtocolError("an unknown message between the two ends of an RDMA link")
