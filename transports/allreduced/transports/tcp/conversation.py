"""Whole control frames on a connection that is authenticated but belongs to no link yet."""

from __future__ import annotations

from typing import Final

from allreduced.core.errors import ProtocolError
from allreduced.transports.base import MAX_CONTROL
from allreduced.transports.tcp import wire
from allreduced.transports.tcp.stream import Stream

LONGEST: Final = 4 << 10
"""Bytes of a frame of the negotiation at most."""

_PIECE: Final = 512
_DECLINED: Final = 0


class Conversation:
    """Sends and receives frames one after the other, on a stream that :meth:`end` gives back."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._in = bytearray()

    def end(self) -> Stream:
        """Return the stream for the control flow, with everything that was not consumed still to be received."""
        if self._in:
            self._stream.unread(bytes(self._in))
            self._in.clear()
        return self._stream

    async def next_kind(self) -> int:
        """Wait for the next frame and return its kind, without taking it. May be cancelled; nothing is lost.

        :raises ProtocolError: the bytes are no control frame.
        :raises ConnectionError: the other side closed the connection.
        """
        while len(self._in) < wire.CONTROL_HEADER:
            await self._more()
        return wire.read_control_header(self._in, 0, MAX_CONTROL, wire.NEGOTIATE)[0]

    async def receive(self) -> bytes:
        """Take the next frame, which must be one of the negotiation, and return its payload.

        :raises ProtocolError: it is another one, or too long.
        :raises ConnectionError: the other side closed the connection.
        """
        while len(self._in) < wire.CONTROL_HEADER:
            await self._more()
        kind, length = wire.read_control_header(self._in, 0, LONGEST, wire.NEGOTIATE)
        if kind != wire.NEGOTIATE:
            raise ProtocolError("another control frame in the middle of a negotiation")
        end = wire.CONTROL_HEADER + length
        while len(self._in) < end:
            await self._more()
        payload = bytes(self._in[wire.CONTROL_HEADER : end])
        del self._in[:end]
        return payload

    async def send(self, payload: bytes) -> None:
        """Send a frame of the negotiation."""
        await self._stream.send_all(wire.control_header(wire.NEGOTIATE, len(payload)) + payload)

    async def _more(self) -> None:
        data = await self._stream.receive(_PIECE)
        if not data:
            raise ConnectionResetError("the connection was closed during the negotiation")
        self._in += data  # in the same step as it was read, so that a cancelled wait loses nothing


def decline(reason: str) -> bytes:
    """Return the message that says why the data goes by TCP. Other messages begin with another byte."""
    return bytes([_DECLINED]) + reason.encode()[: LONGEST - 1]


def declined(message: bytes) -> str | None:
    """Return the reason that :func:`decline` was given, or None for another message."""
    if message[:1] != bytes([_DECLINED]):
        return None
    return message[1:].decode(errors="replace") or "the other end gave no reason"
