"""Names of hosts, looked up by the system's resolver, which blocks and cannot be stopped.

So each question has a thread of its own, which keeps neither the loop nor the end of the process waiting. A question
that is open already is not asked again: a resolver that does not answer costs one thread a name, however often it is
asked.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from concurrent.futures import Future
from typing import Final, TypeAlias

from allreduced.core.addresses import is_numeric

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
        answer = _open[key] = Future()
        answer.set_running_or_notify_cancel()  # one who does not wait any more must not cancel it for the others
        try:
            threading.Thread(target=_answer, args=(key, answer), name="lookup", daemon=True).start()
        except RuntimeError as error:
            del _open[key]
            raise OSError(errno.EAGAIN, f"no thread to look {host} up") from error
    return await asyncio.wrap_future(answer)


def _answer(key: tuple[str, int], answer: Future[Places]) -> None:
    try:
        found = _ask(*key)
    except Exception as error:  # whatever it is, who asked gets it
        _open.pop(key, None)  # two loops may have asked at the same moment
        answer.set_exception(error)
    else:
        _open.pop(key, None)
        answer.set_result(found)


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
