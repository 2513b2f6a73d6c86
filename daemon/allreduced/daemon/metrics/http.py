"""A small HTTP/1.1 server for GET and HEAD of a few paths, on the agent's own event loop.

h11 reads and writes the protocol, ``request`` decides what is answered; here are the limits. Each connection serves
one request. It has so many seconds to come and to be read, so many bytes, and there are so many connections: nobody can
hold up the loop or fill memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias, cast

import h11

from allreduced.core.log_limit import LogLimit
from allreduced.daemon.metrics.hosts import host_named
from allreduced.daemon.metrics.request import Refusal, path_of, refusal_of

logger = logging.getLogger("allreduced.metrics")

MAX_REQUEST = 8 << 10
"""Bytes of a request line and its headers."""

MAX_DISCARDED = 256 << 10
"""Bytes that are read and dropped after the answer, so that the other side can read it before the connection ends."""

MAX_CONNECTIONS = 16
"""Connections at once; a further one is told to come later."""

MAX_TURNED_AWAY = 16
"""Connections at once that are told so; a further one is cut."""

REQUEST_SECONDS = 5.0
"""Seconds in which a request must be here."""

ANSWER_SECONDS = 10.0
"""Seconds in which an answer must be made, and read."""

LINGER_SECONDS = 1.0
"""Seconds in which the other side must end the connection after an answer before it is cut."""

TOO_MANY = "too many connections"

TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent back."""

    status: HTTPStatus
    body: bytes
    content_type: str = TEXT


Handler: TypeAlias = "Callable[[], Awaitable[Answer]]"


def plain(status: HTTPStatus, text: str) -> Answer:
    """Return an answer of one line, or of several."""
    return Answer(status, f"{text}\n".encode())


@dataclass(frozen=True, slots=True)
class Limits:
    """In seconds and connections; smaller ones make tests quick."""

    request_seconds: float = REQUEST_SECONDS
    answer_seconds: float = ANSWER_SECONDS
    linger_seconds: float = LINGER_SECONDS
    connections: int = MAX_CONNECTIONS


class HttpServer:
    """Serves ``paths``. ``names``: host names that requests may ask for, besides loopback's and the address itself."""

    def __init__(self, paths: Mapping[str, Handler], names: Collection[str] = (), limits: Limits | None = None) -> None:
        self.paths = paths
        self.names = frozenset(host for name in names if (host := host_named(name)) is not None)
        self.limits = limits or Limits()
        self.log = LogLimit(logger)
        self.connections: set[Connection] = set()
        self.turned_away: set[Connection] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Listen, and return the address that was got.

        :raises OSError: it cannot be had.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), host, port, backlog=MAX_CONNECTIONS)
        name = self._server.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    async def close(self) -> None:
        """Listen no more and cut what is open."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        connections = (*self.connections, *self.turned_away)
        for connection in connections:
            connection.cut()
        for connection in connections:
            await connection.over.wait()
        if server is not None:
            await server.wait_closed()


class Connection(asyncio.Protocol):
    """One connection, and its one request."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST)
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._answered = self._head = self._ended = False
        self._received = self._discarded = 0
        self.over = asyncio.Event()

    # From the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the request, or send the caller away."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        server = self._server
        if len(server.connections) < server.limits.connections:
            server.connections.add(self)
            self._within(server.limits.request_seconds, self._too_slow)
        elif len(server.turned_away) < MAX_TURNED_AWAY:
            server.turned_away.add(self)
            self._refuse(Refusal(HTTPStatus.SERVICE_UNAVAILABLE, f"{TOO_MANY}; come again later"))
        else:
            self._log_refusal(HTTPStatus.SERVICE_UNAVAILABLE, TOO_MANY)
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take a piece of the request."""
        if self._answered or self._task is not None:
            self._discarded += len(data)
            if self._discarded > MAX_DISCARDED:
                self.cut()
            return
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
            self._received += len(data)
        except h11.RemoteProtocolError as error:
            self._refuse(Refusal(HTTPStatus(error.error_status_hint), str(error)))
            return
        if isinstance(event, h11.Request):
            if self._received - len(self._http.trailing_data[0]) > MAX_REQUEST:  # h11 limits what comes in pieces
                reason = f"more than {MAX_REQUEST} bytes of headers"
                self._refuse(Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, reason))
            else:
                self._request(event)

    def eof_received(self) -> bool:
        """Go on with the answer that is under way, if there is one; the other side sends nothing any more."""
        self._ended = True
        return self._task is not None and not self._answered

    def connection_lost(self, error: Exception | None) -> None:
        """Forget everything."""
        del error
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._server.connections.discard(self)
        self._server.turned_away.discard(self)
        self.over.set()

    # The request

    def _request(self, request: h11.Request) -> None:
        self._head = request.method == b"HEAD"
        refusal = refusal_of(request, str(self._transport.get_extra_info("sockname")[0]), self._server.names)
        if refusal is not None:
            self._refuse(refusal)
            return
        handler = self._server.paths.get(path_of(request))
        if handler is None:
            self._answer(plain(HTTPStatus.NOT_FOUND, f"there are {', '.join(self._server.paths)}"))
            return
        self._within(self._server.limits.answer_seconds, self.cut)
        self._task = asyncio.get_running_loop().create_task(self._handle(handler))

    async def _handle(self, handler: Handler) -> None:
        try:
            answer = await handler()
        except Exception:  # the caller learns of a defect, and the agent goes on
            logger.exception("event=defect handling=%s", "http request")
            answer = plain(HTTPStatus.INTERNAL_SERVER_ERROR, "a defect; see the agent's log")
        self._answer(answer)

    # The answer

    def _refuse(self, refusal: Refusal) -> None:
        self._log_refusal(refusal.status, refusal.reason)
        self._answer(plain(refusal.status, refusal.reason), refusal.headers)

    def _log_refusal(self, status: HTTPStatus, reason: str) -> None:
        where = self._transport.get_extra_info("peername")
        source = str(where[0]) if where else ""
        self._server.log.warning("event=http_refused status=%d from=%s reason=%s", status, source, reason)

    def _answer(self, answer: Answer, headers: Sequence[tuple[str, str]] = ()) -> None:
        """Send the answer, then wait for a moment until the other side has read it."""
        if self._answered or self._transport.is_closing():
            return
        self._answered = True
        response = h11.Response(
            status_code=int(answer.status),
            reason=answer.status.phrase,
            headers=[
                ("Content-Type", answer.content_type),
                ("Content-Length", str(len(answer.body))),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
                ("Connection", "close"),
                *headers,
            ],
        )
        events = (
            (response, h11.EndOfMessage()) if self._head else (response, h11.Data(data=answer.body), h11.EndOfMessage())
        )
        self._transport.write(b"".join(self._http.send(event) or b"" for event in events))
        self._transport.write_eof()
        if self._ended:
            self._transport.close()
        unread = self._transport.get_write_buffer_size()
        limits = self._server.limits
        self._within(limits.answer_seconds if unread else limits.linger_seconds, self.cut)

    # Time

    def _within(self, seconds: float, late: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, late)

    def _too_slow(self) -> None:
        seconds = self._server.limits.request_seconds
        self._refuse(Refusal(HTTPStatus.REQUEST_TIMEOUT, f"no request within {seconds:g} s"))

    def cut(self) -> None:
        """End the connection now."""
        self._transport.abort()
