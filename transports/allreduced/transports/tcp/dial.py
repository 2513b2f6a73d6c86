"""Opens the flows of a link to a listening agent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

from allreduced.core.errors import AgentUnavailable, AuthenticationError, ProtocolError
from allreduced.core.resolver import SockAddr, look_up
from allreduced.transports.base import Handshake, LinkEvents, LinkOptions
from allreduced.transports.tcp.address import SCHEME, parse, text
from allreduced.transports.tcp.authenticate import authenticate
from allreduced.transports.tcp.link import TcpLink
from allreduced.transports.tcp.secure import secured
from allreduced.transports.tcp.sockets import prepare
from allreduced.transports.tcp.stream import Stream


@dataclass(slots=True)
class Opened:
    """A link that is being dialled: its control flow is authenticated, its data flows are missing."""

    address: str
    scheme: str
    options: LinkOptions
    family: socket.AddressFamily
    target: SockAddr
    stream: Stream
    control: Handshake
    local_host: str
    """The numeric address through which the peer was reached."""
    local: str
    remote: str


async def dial(address: str, events: LinkEvents, options: LinkOptions) -> TcpLink:
    """Open the control flow, then all data flows at once. See ``Transport.connect``."""
    async with streams_of_a_link() as streams:
        opened = await open_control(address, options, streams)
        link = await finish_over_tcp(opened, streams)
    link.start(events)
    return link


@asynccontextmanager
async def streams_of_a_link() -> AsyncIterator[list[Stream]]:
    """Yield where the streams of a link are put; where it does not come about they are closed."""
    streams: list[Stream] = []
    try:
        yield streams
    except BaseException:
        for stream in streams:
            stream.close(reset=False)
        raise


async def open_control(address: str, options: LinkOptions, streams: list[Stream], scheme: str = SCHEME) -> Opened:
    """Connect and authenticate the control flow. Errors as ``Transport.connect``."""
    host, port = parse(address, scheme)
    family, target, sock = await _open_first(address, host, port, options)
    here = sock.getsockname()  # the system forgets it when the peer resets the connection
    stream, control = await _authenticated(address, sock, options, streams, b"", 0)
    return Opened(
        address, scheme, options, family, target, stream, control, here[0], text(here, scheme), text(target, scheme)
    )


async def finish_over_tcp(opened: Opened, streams: list[Stream]) -> TcpLink:
    """Open all data flows and return the link, not started."""
    options, control = opened.options, opened.control

    async def open_data(flow: int) -> Stream:
        sock = await _open_data(opened.address, opened.family, opened.target, options)
        stream, _ = await _authenticated(opened.address, sock, options, streams, control.session, flow)
        return stream

    try:
        async with asyncio.TaskGroup() as group:
            opening = [group.create_task(open_data(flow)) for flow in range(1, options.flows + 1)]
    except ExceptionGroup as errors:
        error = errors.exceptions[0]  # one flow that fails fails the link; the others were cancelled
        raise error from error.__cause__
    return TcpLink(
        control.peer,
        opened.stream,
        [task.result() for task in opening],
        initiator=True,
        local_address=opened.local,
        remote_address=opened.remote,
        max_frame=options.max_frame,
        version=control.version,
    )


async def _open_first(
    address: str, host: str, port: int, options: LinkOptions
) -> tuple[socket.AddressFamily, SockAddr, socket.socket]:
    """Connect to the first address of the host that answers; return its address and the connection."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + options.connect_timeout
    try:
        async with asyncio.timeout_at(deadline):
            targets = await look_up(host, port)
    except OSError as error:  # TimeoutError is one
        unavailable(address, error)
    failures: list[OSError] = []
    for index, (family, target) in enumerate(targets):
        share = (deadline - loop.time()) / (len(targets) - index)
        try:
            sock = await _open(family, target, options, share)
        except OSError as error:
            failures.append(error)
        else:
            return family, target, sock
    # Only all addresses together prove that nobody is there, so a refusal counts least of what went wrong.
    failures.sort(key=lambda error: isinstance(error, ConnectionRefusedError))
    unavailable(address, failures[0] if failures else OSError(f"{host} has no address"))


async def _open_data(
    address: str, family: socket.AddressFamily, target: SockAddr, options: LinkOptions
) -> socket.socket:
    try:
        return await _open(family, target, options, options.connect_timeout)
    except OSError as error:
        unavailable(address, error)


async def _open(family: socket.AddressFamily, target: SockAddr, options: LinkOptions, timeout: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        prepare(sock, options.max_frame)
        async with asyncio.timeout(timeout):
            await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


async def _authenticated(
    address: str, sock: socket.socket, options: LinkOptions, streams: list[Stream], session: bytes, flow: int
) -> tuple[Stream, Handshake]:
    """Own the socket, make one flow of it and return that, which is also appended to ``streams``."""
    try:
        async with asyncio.timeout(options.handshake_timeout):
            stream = await _stream(sock, options, streams)
            handshake = options.authenticator.dial(session, flow, options.flows, stream.channel)
            await authenticate(stream, handshake)
    except (AuthenticationError, ProtocolError) as error:
        raise type(error)(f"{address}: {error.message}", hint=error.hint) from error
    except OSError as error:
        unavailable(address, error)
    return stream, handshake


async def _stream(sock: socket.socket, options: LinkOptions, streams: list[Stream]) -> Stream:
    """Return the stream of a connection, also appended to ``streams``; close it where there is none."""
    try:
        stream = await secured(sock, options.credentials)
    except BaseException:
        sock.close()
        raise
    streams.append(stream)
    return stream


def unavailable(address: str, error: OSError) -> NoReturn:
    """Say that nobody was reached at ``address``, and why.

    :raises AgentUnavailable: always.
    """
    if isinstance(error, TimeoutError):
        reason, hint = "no answer in time", "is the host up, and does a firewall let this port through?"
    elif isinstance(error, ConnectionRefusedError):
        reason, hint = "the connection was refused", "does the agent run there, and is the port right?"
    else:
        reason, hint = error.strerror or str(error), ""
    raise AgentUnavailable(f"no agent at {address}: {reason}", hint=hint) from error
