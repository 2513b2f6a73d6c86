"""Cutting a byte stream into messages: a little-endian ``u32`` body length, then the body."""

from __future__ import annotations

import struct
from typing import NoReturn, TypeAlias

from allreduced.core.errors import ProtocolError

HEADER = 4
"""Bytes of the length in front of each body."""

_LENGTH = struct.Struct("<I")

Body: TypeAlias = "bytes | bytearray"


class MessageReader:
    """Collects bytes and hands out complete bodies of 1 to ``max_body`` bytes.

    It holds one partial message at most, and only the bytes of it that really came: a length alone reserves nothing.
    Each byte is copied once, or twice where a message comes in several pieces.
    """

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._partial = bytearray()
        self._needed = HEADER
        self._error: str | None = None

    @property
    def pending(self) -> bool:
        """True while the beginning of a message waits for its rest: an end of the stream now cuts a message off."""
        return bool(self._partial)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Body]:
        """Take the next bytes of the stream and return the bodies that are complete now, in order.

        The bodies are the caller's; nothing of ``data`` is kept.

        :raises ProtocolError: a length is 0 or over the maximum. Bodies before it in this ``data`` are lost, and
            every further call raises again: the stream is of no use any more.
        """
        if self._error is not None:
            raise ProtocolError(self._error)
        if not self._partial and len(data) > HEADER:
            [length] = _LENGTH.unpack_from(data)
            if length + HEADER == len(data) and length <= self._max_body:
                return [bytes(data[HEADER:])]  # one whole message, as most are that come alone
        view = memoryview(data)
        bodies: list[Body] = []
        position = 0
        if self._partial:
            position = self._complete(view, bodies)
        end = len(view)
        while end - position >= HEADER:
            start = position + HEADER
            [length] = _LENGTH.unpack_from(view, position)
            stop = start + (length if 0 < length <= self._max_body else self._refuse(length))
            if stop > end:
                break
            bodies.append(view[start:stop].tobytes())
            position = stop
        if position < end:
            self._keep(view[position:])
        return bodies

    def _complete(self, view: memoryview, bodies: list[Body]) -> int:
        """Add to the partial message what it lacks; return how many bytes of ``view`` that took."""
        position = 0
        while position < len(view):
            piece = view[position : position + self._needed - len(self._partial)]
            self._partial += piece
            position += len(piece)
            if len(self._partial) < self._needed:
                break
            if self._needed == HEADER:
                self._needed += self._length(self._partial)
                continue
            body, self._partial, self._needed = self._partial, bytearray(), HEADER
            del body[:HEADER]
            bodies.append(body)
            break
        return position

    def _keep(self, view: memoryview) -> None:
        self._partial += view
        self._needed = HEADER
        if len(view) >= HEADER:
            self._needed += self._length(view[:HEADER])

    def _length(self, header: memoryview | bytearray) -> int:
        length = int.from_bytes(header[:HEADER], "little")
        return length if 0 < length <= self._max_body else self._refuse(length)

    def _refuse(self, length: int) -> NoReturn:
        self._partial = bytearray()
        self._error = f"a message tells a length of {length} bytes, 1 to {self._max_body} are allowed"
        raise ProtocolError(self._error)
