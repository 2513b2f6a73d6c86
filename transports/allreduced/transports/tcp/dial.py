"""Opens the flows of a link to a listening agent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

from allreduced.core.errors import AgentUnavailable, AuthenticationError, ProtocolError
from allreduced.transports.base import Handshake, LinkEvents, LinkOptions
from allreduced.transports.tcp.address import SCHEME, SockAddr, parse, resolve, text
from allreduced.transports.tcp.authenticate import authenticate
from allreduced.transports.tcp.link import TcpLink
from allreduced.transports.tcp.sockets import prepare


@dataclass(slots=True)
class Opened:
    """A link that is being dialled: its control flow is authenticated, its data flows are missing."""

    address: str
    scheme: str
    options: LinkOptions
    family: socket.AddressFamily
    target: SockAddr
    sock: socket.socket
    control: Handshake
    local_host: str
    """The numeric address through which the peer was reached."""
    local: str
    remote: str


async def dial(address: str, events: LinkEvents, options: LinkOptions) -> TcpLink:
    """Open the control flow, then all data flows at once. See ``Transport.connect``."""
    async with sockets_of_a_link() as sockets:
        opened = await open_control(address, options, sockets)
        link = await finish_over_tcp(opened, opened.control.trailing, sockets)
    link.start(events)
    return link


@asynccontextmanager
async def sockets_of_a_link() -> AsyncIterator[list[socket.socket]]:
    """Yield where the sockets of a link are put; where it does not come about they are closed."""
    sockets: list[socket.socket] = []
    try:
        yield sockets
    except BaseException:
        for sock in sockets:
            sock.close()
        raise


async def open_control(
    address: str, options: LinkOptions, sockets: list[socket.socket], scheme: str = SCHEME
) -> Opened:
    """Connect and authenticate the control flow. Errors as ``Transport.connect``."""
    host, port = parse(address, scheme)
    family, target = await _open_first(address, host, port, options, sockets)
    sock = sockets[0]
    here = sock.getsockname()  # the system forgets it when the peer resets the connection
    control = options.authenticator.dial(b"", 0, options.flows)
    await _authenticate(address, sock, control, options)
    return Opened(
        address, scheme, options, family, target, sock, control, here[0], text(here, scheme), text(target, scheme)
    )


async def finish_over_tcp(opened: Opened, rest: bytes, sockets: list[socket.socket]) -> TcpLink:
    """Open all data flows and return the link, not started. ``rest``: what was read of the control flow already."""
    options, control = opened.options, opened.control

    async def open_data(flow: int) -> tuple[socket.socket, bytes]:
        sock = await _open_data(opened.address, opened.family, opened.target, options, sockets)
        handshake = options.authenticator.dial(control.session, flow, options.flows)
        await _authenticate(opened.address, sock, handshake, options)
        return sock, handshake.trailing

    try:
        async with asyncio.TaskGroup() as group:
            opening = [group.create_task(open_data(flow)) for flow in range(1, options.flows + 1)]
    except ExceptionGroup as errors:
        error = errors.exceptions[0]  # one flow that fails fails the link; the others were cancelled
        raise error from error.__cause__
    return TcpLink(
        control.peer,
        (opened.sock, rest),
        [task.result() for task in opening],
        initiator=True,
        local_address=opened.local,
        remote_address=opened.remote,
        max_frame=options.max_frame,
    )


async def _open_first(
    address: str, host: str, port: int, options: LinkOptions, sockets: list[socket.socket]
) -> tuple[socket.AddressFamily, SockAddr]:
    """Connect to the first address of the host that answers; append the socket and return its address."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + options.connect_timeout
    try:
        async with asyncio.timeout_at(deadline):
            targets = await resolve(host, port)
    except OSError as error:  # TimeoutError is one
        unavailable(address, error)
    failures: list[OSError] = []
    for index, (family, target) in enumerate(targets):
        share = (deadline - loop.time()) / (len(targets) - index)
        try:
            await _open(family, target, options, share, sockets)
        except OSError as error:
            failures.append(error)
        else:
            return family, target
    # Only all addresses together prove that nobody is there, so a refusal counts least of what went wrong.
    failures.sort(key=lambda error: isinstance(error, ConnectionRefusedError))
    unavailable(address, failures[0] if failures else OSError(f"{host} has no address"))


async def _open_data(
    address: str, family: socket.AddressFamily, target: SockAddr, options: LinkOptions, sockets: list[socket.socket]
) -> socket.socket:
    try:
        return await _open(family, target, options, options.connect_timeout, sockets)
    except OSError as error:
        unavailable(address, error)


async def _open(
    family: socket.AddressFamily, target: SockAddr, options: LinkOptions, timeout: float, sockets: list[socket.socket]
) -> socket.socket:
    """Return a new connection, which is also appended to ``sockets``."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        prepare(sock, options.max_frame)
        async with asyncio.timeout(timeout):
            await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    sockets.append(sock)
    return sock


async def _authenticate(address: str, sock: socket.socket, handshake: Handshake, options: LinkOptions) -> None:
    try:
        async with asyncio.timeout(options.handshake_timeout):
            await authenticate(sock, handshake)
    except (AuthenticationError, ProtocolError) as error:
        raise type(error)(f"{address}: {error.message}", hint=error.hint) from error
    except OSError as error:
        unavailable(address, error)


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
