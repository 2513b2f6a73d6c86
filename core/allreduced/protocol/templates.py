"""The two messages of every operation, encoded at a part of the cost of ``local.encode``, to the same bytes.

Training makes the same calls again and again: most of their messages is encoded once, and only what differs from one
call to the next is put in.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import msgpack

from allreduced.core.errors import InternalError
from allreduced.protocol.local import MAX_MESSAGE, Done, Submit, encode

_HEADER = 4
"""Bytes of the length in front of a message."""

_LENGTH = struct.Struct("<I")
_FLOAT = struct.Struct(">Bd")
_BYTES_8 = struct.Struct(">BB")
_BYTES_16 = struct.Struct(">BH")
_BYTES_32 = struct.Struct(">BI")
_NIL, _FALSE, _TRUE = b"\xc0", b"\xc2", b"\xc3"
_NOWHERE = b"\xff\x00" + _FALSE
"""Arena -1, offset 0, no upload."""

_number: Callable[[int], bytes] = msgpack.Packer().pack  # of an integer: nothing else can run meanwhile


def _bytes_head(nbytes: int) -> bytes:
    """Return what comes before so many bytes."""
    if nbytes < 1 << 8:
        return _BYTES_8.pack(0xC4, nbytes)
    return _BYTES_16.pack(0xC5, nbytes) if nbytes < 1 << 16 else _BYTES_32.pack(0xC6, nbytes)


def _too_long(body: bytes) -> InternalError:
    return InternalError(f"a message has {len(body)} bytes, at most {MAX_MESSAGE} can be sent")


class SubmitTemplate:
    """Encodes the submits of equal calls. They differ in their number and in where their input is."""

    __slots__ = ("_begin", "_call", "_end")

    def __init__(self, submit: Submit) -> None:
        """``submit``: one of the calls, with whatever number and input."""
        body = encode(replace(submit, request=0, payload=None, arena=-1, offset=0, upload=False))[_HEADER:]
        # An array of 18 items: three bytes; the code, the request; at the end nil, -1, 0, false and inline_result.
        self._begin, self._call, self._end = body[:4], body[5:-5], body[-1:]

    def encode(
        self, request: int, payload: bytes | None = None, arena: int = -1, offset: int = 0, upload: bool = False
    ) -> bytes:
        """Return the message as it goes over the socket, with its length in front; with ``payload`` nothing else.

        :raises InternalError: it is too long.
        """
        if payload is not None:
            data, place = _bytes_head(len(payload)) + payload, _NOWHERE
        else:
            data, place = _NIL, _number(arena) + _number(offset) + (_TRUE if upload else _FALSE)
        body = self._begin + _number(request) + self._call + data + place + self._end
        if len(body) > MAX_MESSAGE:
            raise _too_long(body)
        return _LENGTH.pack(len(body)) + body


class DoneTemplate:
    """Encodes the ends of operations that ended in the same way. They differ in their number, result and time."""

    __slots__ = ("_begin", "_end")

    def __init__(self, participants: tuple[int, ...], algorithm: str) -> None:
        body = encode(Done(0, None, -1, 0, 0, 0, False, participants, algorithm, 0.0))[_HEADER:]
        # An array of 11 items: one byte; the code, the request, six items of a byte each; at the end a float.
        self._begin, self._end = body[:2], body[9:-9]

    def encode(
        self,
        request: int,
        payload: bytes | None,
        arena: int,
        offset: int,
        nbytes: int,
        lease: int,
        pieces: bool,
        elapsed: float,
    ) -> bytes:
        """Return the message as it goes over the socket, with its length in front.

        :raises InternalError: it is too long.
        """
        data = _NIL if payload is None else _bytes_head(len(payload)) + payload
        place = _number(arena) + _number(offset) + _number(nbytes) + _number(lease) + (_TRUE if pieces else _FALSE)
        body = self._begin + _number(request) + data + place + self._end + _FLOAT.pack(0xCB, elapsed)
        if len(body) > MAX_MESSAGE:
            raise _too_long(body)
        return _LENGTH.pack(len(body)) + body
