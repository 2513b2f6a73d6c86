"""Takes the clients' socket from the service manager, which may listen there before the agent runs."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from typing import Final

from allreduced.core.errors import ConfigError
from allreduced.daemon.socket_path import BoundSocket

FIRST: Final = 3
"""The first descriptor that is handed over, see sd_listen_fds(3)."""

NAME = "clients"
"""``FileDescriptorName=`` of the clients' socket; a single descriptor may have any name."""

_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


def handed_socket(
    environ: MutableMapping[str, str], *, pid: int | None = None, first: int = FIRST
) -> BoundSocket | None:
    """Return the socket that was handed over, listening and non-blocking; None where there is none.

    The variables are taken out of ``environ``, so that no child believes that they are meant for it.

    :raises ConfigError: what was handed over is not one Unix stream socket for clients.
    """
    said = {name: environ.pop(name, "") for name in _VARIABLES}
    if said["LISTEN_PID"] != str(os.getpid() if pid is None else pid) or not said["LISTEN_FDS"].isdecimal():
        return None
    count = int(said["LISTEN_FDS"])
    if count == 0:
        return None
    names = said["LISTEN_FDNAMES"].split(":") if said["LISTEN_FDNAMES"] else []
    chosen = [at for at, name in enumerate(names[:count]) if name == NAME]
    if count == 1:
        chosen = [0]
    if len(chosen) != 1:
        raise ConfigError(
            f"{count} sockets were handed over, {len(chosen)} of them named {NAME!r}: {', '.join(names) or '-'}",
            path="LISTEN_FDNAMES",
            hint=f"hand over one Unix socket, with FileDescriptorName={NAME}",
        )
    descriptor = first + chosen[0]
    try:
        for at in range(count):
            os.set_inheritable(first + at, False)
        sock = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigError(
            f"descriptor {descriptor} that was handed over is no socket: {error.strerror}",
            path="LISTEN_FDS",
            hint="LISTEN_FDS and LISTEN_PID are for a service manager to set: unset them",
        ) from error
    if not _is_for_clients(sock):
        sock.close()
        raise ConfigError(
            f"descriptor {descriptor} that was handed over is no listening Unix stream socket",
            path="LISTEN_FDS",
            hint="use ListenStream= with a path in the socket unit",
        )
    sock.setblocking(False)
    name = sock.getsockname()
    text = name.decode(errors="surrogateescape") if isinstance(name, bytes) else str(name)
    return BoundSocket(sock, f"@{text[1:]}" if text.startswith("\0") else text, None)


def _is_for_clients(sock: socket.socket) -> bool:
    unix_stream = sock.family == socket.AF_UNIX and sock.type == socket.SOCK_STREAM
    return unix_stream and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
