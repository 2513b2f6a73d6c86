"""Names of hosts, looked up by the system's resolver, which blocks and cannot be stopped.

So each question has a thread of its own (see ``aside``). A question that is open already is not asked again: a resolver
that does not answer costs one thread a name, however often it is asked.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future
from typing import Final, TypeAlias

from allreduced.core.addresses import is_numeric
from allreduced.core.aside import run_aside

SockAddr: TypeAlias = "tuple[str, int] | tuple[str, int, int, int]"
"""An address as sockets of TCP take it; the host is numeric."""
Places: TypeAlias = "tuple[tuple[socket.AddressFamily, SockAddr], ...]"

_open: Final[dict[tuple[str, int], Future[Places]]] = {}


async def look_up(host: str, port: int) -> Places:
    """Return the addresses of a host for TCP, best first, at least one. Numeric ones need no resolver and no thread.

    It takes as long as the system's resolver, so bound it; cancelling ends the wait only.

    :raises OSError: the name is not known, or nobody who knows could be asked.
    """
    if is_numeric(host):
        return _ask(host, port, socket.AI_NUMERICHOST | socket.AI_NUMERICSERV)
    key = host, port
    answer = _open.get(key)
    if answer is None:
        answer = _open[key] = run_aside(lambda: _ask(*key), "lookup")
        answer.add_done_callback(lambda _: _open.pop(key, None))  # the first callback: before anybody hears the answer
    return await asyncio.wrap_future(answer)


def _ask(host: str, port: int, flags: int = 0) -> Places:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:  # a label of no or too many letters; an answer of DNS may have one
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is no name of a host") from error
    return tuple(dict.fromkeys((family, _sockaddr(address)) for family, _, _, _, address in found))


def _sockaddr(address: tuple[object, ...]) -> SockAddr:
    host, port = str(address[0]), address[1]
    flow, scope = (address[2], address[3]) if len(address) == 4 else (None, None)
    if not isinstance(port, int):
        raise OSError(f"no TCP address: {address!r}")
    if isinstance(flow, int) and isinstance(scope, int):
        return host, port, flow, scope
    return host, port
