"""An agent's end of a TCP link by hand: it authenticates like one, then sends and reads what a test says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.contract.conftest import BOUND, Recorder

from allreduced.core.errors import AgentUnavailable
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports.base import Handshake, Link, LinkEvents, LinkOptions, Listener
from allreduced.transports.tcp import TcpTransport
from allreduced.transports.tcp.authenticate import authenticate
from allreduced.transports.tcp.stream import PlainStream

SECRET = b"hush"


async def turns_until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds."""
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110 - bytes in memory set no event
            await asyncio.sleep(0)


async def open_socket(address: str, *, receive_buffer: int = 0) -> socket.socket:
    """Connect to ``tcp://host:port`` and say nothing."""
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or 0
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(sock, (host, port))
    return sock


async def read(sock: socket.socket, nbytes: int) -> bytes:
    """Read exactly so many bytes."""
    data = bytearray()
    async with asyncio.timeout(BOUND):
        while len(data) < nbytes:
            piece = await asyncio.get_running_loop().sock_recv(sock, nbytes - len(data))
            if not piece:
                raise EOFError(f"{len(data)} of {nbytes} bytes")
            data += piece
    return bytes(data)


async def read_to_end(sock: socket.socket) -> bytes:
    """Read until the other side ends the connection, in order or by a reset."""
    data = bytearray()
    async with asyncio.timeout(BOUND):
        while True:
            try:
                piece = await asyncio.get_running_loop().sock_recv(sock, 65536)
            except ConnectionResetError:
                return bytes(data)
            if not piece:
                return bytes(data)
            data += piece


async def write(sock: socket.socket, data: bytes) -> None:
    """Send all of it."""
    async with asyncio.timeout(BOUND):
        await asyncio.get_running_loop().sock_sendall(sock, data)


@dataclass
class RawLink:
    """The raw end and the real end of one link."""

    control: socket.socket
    data: list[socket.socket]
    link: Link
    events: Recorder


@asynccontextmanager
async def listening(
    *, address: str = "tcp://127.0.0.1:0", **options: float
) -> AsyncIterator[tuple[Listener, asyncio.Queue[tuple[Link, Recorder]]]]:
    """Yield the listener of agent ``b`` and its links; all of them are gone afterwards."""
    queue: asyncio.Queue[tuple[Link, Recorder]] = asyncio.Queue()
    links: list[tuple[Link, Recorder]] = []

    def accepted(link: Link) -> LinkEvents:
        links.append((link, Recorder()))
        queue.put_nowait(links[-1])
        return links[-1][1]

    authenticator = SecretAuthenticator("b", 2, SECRET)
    made = LinkOptions(
        authenticator,
        max_frame=int(options.get("max_frame", 64 << 10)),
        handshake_timeout=options.get("handshake_timeout", BOUND),
        max_pending_handshakes=int(options.get("max_pending_handshakes", 64)),
    )
    listener = await TcpTransport().listen(address, accepted, made)
    try:
        yield listener, queue
    finally:
        await listener.close()
        for link, events in links:
            link.abort(AgentUnavailable("the test is over"))
            await events.until_closed()


async def open_flow(address: str, handshake: Handshake, *, receive_buffer: int = 0) -> socket.socket:
    """Connect and authenticate one flow."""
    sock = await open_socket(address, receive_buffer=receive_buffer)
    await authenticate(PlainStream(sock), handshake)
    return sock


@asynccontextmanager
async def raw_link(*, flows: int = 1, receive_buffer: int = 0, max_frame: int = 64 << 10) -> AsyncIterator[RawLink]:
    """Yield a link whose dialling end, agent ``a``, is a test."""
    a = SecretAuthenticator("a", 1, SECRET)
    sockets: list[socket.socket] = []
    async with listening(max_frame=max_frame) as (listener, queue):
        try:
            handshake = a.dial(b"", 0, flows)
            sockets.append(await open_flow(listener.address, handshake, receive_buffer=receive_buffer))
            for flow in range(1, flows + 1):
                answer = a.dial(handshake.session, flow, flows)
                sockets.append(await open_flow(listener.address, answer, receive_buffer=receive_buffer))
            link, events = await queue.get()
            yield RawLink(sockets[0], sockets[1:], link, events)
        finally:
            for sock in sockets:
                sock.close()
