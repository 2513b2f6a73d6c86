"""Whole control frames on a connection that is authenticated but belongs to no link yet."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from allreduced.core.errors import ProtocolError
from allreduced.transports.base import MAX_CONTROL
from allreduced.transports.tcp import wire

LONGEST: Final = 4 << 10
"""Bytes of a frame of the negotiation at most."""

_PIECE: Final = 512
_DECLINED: Final = 0


class Conversation:
    """Sends and receives frames one after the other. What was read beyond them is kept for whoever takes over."""

    def __init__(self, sock: socket.socket, early: bytes) -> None:
        self._sock = sock
        self._in = bytearray(early)

    @property
    def rest(self) -> bytes:
        """What was read and not consumed; it belongs to the control flow."""
        return bytes(self._in)

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
        frame = wire.control_header(wire.NEGOTIATE, len(payload)) + payload
        await asyncio.get_running_loop().sock_sendall(self._sock, frame)

    async def _more(self) -> None:
        """Add what comes next to the buffer, in the same step as it is read, so that a cancelled wait loses nothing."""
        loop = asyncio.get_running_loop()
        fd = self._sock.fileno()
        done: asyncio.Future[None] = loop.create_future()

        def readable() -> None:
            try:
                data = self._sock.recv(_PIECE)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                loop.remove_reader(fd)
                if not done.done():
                    done.set_exception(error)
                return
            loop.remove_reader(fd)
            self._in += data
            if done.done():
                return
            if data:
                done.set_result(None)
            else:
                done.set_exception(ConnectionResetError("the connection was closed during the negotiation"))

        loop.add_reader(fd, readable)
        try:
            await done
        finally:
            if not done.done() or done.cancelled():
                loop.remove_reader(fd)


def decline(reason: str) -> bytes:
    """Return the message that says why the data goes by TCP. Other messages begin with another byte."""
    return bytes([_DECLINED]) + reason.encode()[: LONGEST - 1]


def declined(message: bytes) -> str | None:
    """Return the reason that :func:`decline` was given, or None for another message."""
    if message[:1] != bytes([_DECLINED]):
        return None
    return message[1:].decode(errors="replace") or "the other end gave no reason"
