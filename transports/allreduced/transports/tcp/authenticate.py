"""Runs a sans-IO handshake over a connection."""

from __future__ import annotations

from allreduced.core.errors import AllReducedError
from allreduced.transports.base import Handshake
from allreduced.transports.tcp.stream import Stream

_PIECE = 512
"""Bytes read at once, so that little lies behind the handshake that the flow must take over."""


async def authenticate(stream: Stream, handshake: Handshake) -> None:
    """Send and receive until the handshake is finished. What came behind it is still to be received.

    :raises AuthenticationError: as ``Handshake.receive``; the refusal, if any, was sent.
    :raises ProtocolError: likewise.
    :raises ConnectionError: the other side closed the connection.
    """
    data = handshake.start()
    if data:
        await stream.send_all(data)
    while not handshake.finished:
        data = await stream.receive(_PIECE)
        if not data:
            raise ConnectionResetError("the connection was closed during the handshake")
        try:
            answer = handshake.receive(data)
        except AllReducedError:
            if handshake.refusal:
                stream.send_now(handshake.refusal)
            raise
        if answer:
            await stream.send_all(answer)
    if handshake.trailing:
        stream.unread(handshake.trailing)
