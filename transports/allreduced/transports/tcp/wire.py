"""The frames on a TCP connection behind the handshake, little-endian.

Control flow: ``magic u16, kind u8, 0 u8, length u32`` and the payload.
Data flow: ``magic u16, kind u8, 0 u8, length u32, posting u64, offset u64, tag u64`` and the payload.

The orderly end: each flow of a side ends with END. A side that has END of all flows of the other says BYE on its
control flow, as its last frame. BYE tells the other that everything has arrived.
"""

from __future__ import annotations

import struct
from typing import Final

from allreduced.core.errors import ProtocolError

PAYLOAD: Final = 0
END: Final = 1
BYE: Final = 2
CARRIER: Final = 3
"""Control flow only: between the two ends of a transport that uses it for itself; the link's owner does not see it."""
NEGOTIATE: Final = 4
"""Control flow only, before the first data flow: which way the data takes."""

_CONTROL_MAGIC: Final = 0xA1C0
_DATA_MAGIC: Final = 0xA1DA

_CONTROL = struct.Struct("<HBBI")
_DATA = struct.Struct("<HBBIQQQ")

CONTROL_HEADER: Final = _CONTROL.size
DATA_HEADER: Final = _DATA.size


def control_header(kind: int, length: int) -> bytes:
    """Return the header of a control frame."""
    return _CONTROL.pack(_CONTROL_MAGIC, kind, 0, length)


def data_header(kind: int, length: int, posting: int, offset: int, tag: int) -> bytes:
    """Return the header of a data frame."""
    return _DATA.pack(_DATA_MAGIC, kind, 0, length, posting, offset, tag)


def read_control_header(data: bytes | bytearray, at: int, longest: int, last: int = BYE) -> tuple[int, int]:
    """Return kind and length of the control frame at ``at``. ``last``: the highest kind that may come.

    :raises ProtocolError: it is none, or its payload is longer than ``longest``.
    """
    magic, kind, zero, length = _CONTROL.unpack_from(data, at)
    if magic != _CONTROL_MAGIC or zero or kind > last or (kind in (END, BYE) and length):
        raise ProtocolError("bytes on the control flow that are no control frame")
    if length > longest:
        raise ProtocolError(f"a control frame of {length} bytes, {longest} are allowed")
    return kind, length


def read_data_header(data: bytes | bytearray, longest: int) -> tuple[int, int, int, int, int]:
    """Return kind, length, posting, offset and tag of a data frame.

    :raises ProtocolError: it is none, or its payload is longer than ``longest``.
    """
    magic, kind, zero, length, posting, offset, tag = _DATA.unpack(data)
    if magic != _DATA_MAGIC or zero or kind > END or (kind == PAYLOAD) != (length > 0):
        raise ProtocolError("bytes on a data flow that are no data frame")
    if length > longest:
        raise ProtocolError(f"a data frame of {length} bytes, {longest} are allowed")
    return kind, length, posting, offset, tag
