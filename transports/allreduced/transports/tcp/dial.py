"""Opens the flows of a link to a listening agent."""

from __future__ import annotations

import asyncio
import socket
from typing import NoReturn

from allreduced.core.errors import AgentUnavailable, AuthenticationError, ProtocolError
from allreduced.transports.base import Handshake, LinkEvents, LinkOptions
from allreduced.transports.tcp.address import SockAddr, parse, resolve, text
from allreduced.transports.tcp.authenticate import authenticate
from allreduced.transports.tcp.link import TcpLink
from allreduced.transports.tcp.sockets import prepare


async def dial(address: str, events: LinkEvents, options: LinkOptions) -> TcpLink:
    """Open the control flow, then all data flows at once. See ``Transport.connect``."""
    host, port = parse(address)
    sockets: list[socket.socket] = []
    link = None
    try:
        family, target = await _open_first(address, host, port, options, sockets)
        local = text(sockets[0].getsockname())  # the system forgets it when the peer resets the connection
        control = options.authenticator.dial(b"", 0, options.flows)
        await _authenticate(address, sockets[0], control, options)

        async def open_data(flow: int) -> tuple[socket.socket, bytes]:
            sock = await _open_data(address, family, target, options, sockets)
            handshake = options.authenticator.dial(control.session, flow, options.flows)
            await _authenticate(address, sock, handshake, options)
            return sock, handshake.trailing

        try:
            async with asyncio.TaskGroup() as group:
                opening = [group.create_task(open_data(flow)) for flow in range(1, options.flows + 1)]
        except ExceptionGroup as errors:
            error = errors.exceptions[0]  # one flow that fails fails the link; the others were cancelled
            raise error from error.__cause__
        link = TcpLink(
            control.peer,
            [(sockets[0], control.trailing), *(task.result() for task in opening)],
            initiator=True,
            local_address=local,
            remote_address=text(target),
            max_frame=options.max_frame,
        )
    finally:
        if link is None:
            for sock in sockets:
                sock.close()
    link.start(events)
    return link


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
        _unavailable(address, error)
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
    _unavailable(address, failures[0] if failures else OSError(f"{host} has no address"))


async def _open_data(
    address: str, family: socket.AddressFamily, target: SockAddr, options: LinkOptions, sockets: list[socket.socket]
) -> socket.socket:
    try:
        return await _open(family, target, options, options.connect_timeout, sockets)
    except OSError as error:
        _unavailable(address, error)


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
        _unavailable(address, error)


def _unavailable(address: str, error: OSError) -> NoReturn:
    if isinstance(error, TimeoutError):
        reason, hint = "no answer in time", "is the host up, and does a firewall let this port through?"
    elif isinstance(error, ConnectionRefusedError):
        reason, hint = "the connection was refused", "does the agent run there, and is the port right?"
    else:
        reason, hint = error.strerror or str(error), ""
    raise AgentUnavailable(f"no agent at {address}: {reason}", hint=hint) from error
