"""How the sockets between agents are set up and closed."""

from __future__ import annotations

import socket
import struct
from typing import Final

KEEPALIVE_IDLE: Final = 30
KEEPALIVE_INTERVAL: Final = 10
KEEPALIVE_COUNT: Final = 3


def prepare(sock: socket.socket, max_frame: int) -> None:
    """Set what every connection between agents is used with. ``max_frame``: bytes of a frame that is sent, at most."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    # Little waits in the kernel, so that an urgent frame is not stuck behind what was queued before it.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, max_frame)


def close_socket(sock: socket.socket, *, reset: bool) -> None:
    """Close a socket; with ``reset`` the kernel forgets what it still holds and the peer is told at once."""
    if reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
