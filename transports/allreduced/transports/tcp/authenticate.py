"""Runs a sans-IO handshake over a non-blocking socket."""

from __future__ import annotations

import asyncio
import socket

from allreduced.core.errors import AllReducedError
from allreduced.transports.base import Handshake

_PIECE = 512
"""Bytes read at once, so that little lies behind the handshake that the flow must take over."""


async def authenticate(sock: socket.socket, handshake: Handshake) -> None:
    """Send and receive until the handshake is finished.

    :raises AuthenticationError: as ``Handshake.receive``; the refusal, if any, was sent.
    :raises ProtocolError: likewise.
    :raises ConnectionError: the other side closed the connection.
    """
    loop = asyncio.get_running_loop()
    data = handshake.start()
    if data:
        await loop.sock_sendall(sock, data)
    while not handshake.finished:
        data = await loop.sock_recv(sock, _PIECE)
        if not data:
            raise ConnectionResetError("the connection was closed during the handshake")
        try:
            answer = handshake.receive(data)
        except AllReducedError:
            _refuse(sock, handshake.refusal)
            raise
        if answer:
            await loop.sock_sendall(sock, answer)


def _refuse(sock: socket.socket, refusal: bytes) -> None:
    """Send the refusal if it fits into the kernel's buffer, which so few bytes always do on a connection that lives."""
    if refusal:
        try:
            sock.send(refusal)
        except OSError:
            return
