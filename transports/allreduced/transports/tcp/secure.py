"""Encrypts a new connection where the agent has credentials."""

from __future__ import annotations

import socket

from allreduced.transports.base import Credentials
from allreduced.transports.tcp.stream import PlainStream, Stream
from allreduced.transports.tcp.tls import TlsStream, is_tls

_PIECE = 512
"""Bytes read to see how the dialler begins; what is more is read by whoever goes on."""


async def secured(sock: socket.socket, credentials: Credentials | None) -> Stream:
    """Return the stream of a connection that was dialled here.

    :raises AuthenticationError: one side does not accept the other's certificate, or the other does not use TLS.
    :raises ConnectionError: the other side closed the connection.
    """
    if credentials is None:
        return PlainStream(sock)
    stream = TlsStream(sock, credentials.context(listening=False), listening=False)
    await stream.handshake()
    return stream


async def secured_or_plain(sock: socket.socket, credentials: Credentials | None) -> Stream:
    """Return the stream of a connection that was accepted here. Errors as :func:`secured`.

    It is plain, too, where the dialler does not begin with TLS: the handshake of agents then tells it what is missing.
    """
    if credentials is None:
        return PlainStream(sock)
    plain = PlainStream(sock)
    first = await plain.receive(_PIECE)
    if not first:
        raise ConnectionResetError("the connection was closed during the handshake")
    if not is_tls(first):
        plain.unread(first)
        return plain
    stream = TlsStream(sock, credentials.context(listening=True), listening=True)
    await stream.handshake(first)
    return stream
