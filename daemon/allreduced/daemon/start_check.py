"""Whether an agent would start with settings, found out without starting one.

The start itself, a reload, ``allreduced agent --check`` and ``allreduced doctor`` ask the same question here. What is
tried is given back at once, and nobody who runs is disturbed. What other programs hold now, such as a port in use, is
no matter of the settings and not looked at.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from allreduced.core.addresses import is_wildcard, parse_address
from allreduced.core.errors import AllReducedError, ConfigError
from allreduced.daemon.access import access_from, socket_group
from allreduced.daemon.certificate_files import Loaded, files_of
from allreduced.daemon.certificate_files import load as load_certificates
from allreduced.daemon.discovery import listening
from allreduced.daemon.dns_discovery import parse_name
from allreduced.daemon.event_loop import loop_factory
from allreduced.daemon.kernel_port import native_kernels, reduction_threads
from allreduced.daemon.memory_share import default_total
from allreduced.daemon.metrics.address import cannot_listen, listen_address
from allreduced.daemon.metrics.assembly import check_libraries
from allreduced.daemon.names import check_services
from allreduced.daemon.rdma_use import decide, examine
from allreduced.daemon.reachability import advertised, check_access, stays_here
from allreduced.daemon.settings import Settings, secret_bytes
from allreduced.daemon.settings_rules import NODE_NAMES, wrong_node_name
from allreduced.daemon.socket_path import check_place
from allreduced.transports.tcp.listener import bound

NAMES_SECONDS: Final = 5.0
"""Seconds that names of hosts are waited for. What is not known by then counts as right: the start finds out."""

_Step: TypeAlias = "Callable[[], object]"


def node_of(settings: Settings, *, private: bool = False) -> str:
    """Return the name of an agent: the setting, else the host's; several ``private`` agents may run on one host."""
    host = socket.gethostname() or "node"
    return settings.agent.node or (f"{host}-{os.getpid()}" if private else host)


@dataclass(slots=True)
class Read:
    """What was in the files that settings name. ``certificates``: None where no TLS is wanted."""

    secret: bytes = b""
    certificates: Loaded | None = None


def check_start(node: str, settings: Settings, *, had: Settings | None = None) -> Read:
    """Check that the agent ``node`` would start with ``settings``, and return what it starts with. Blocks.

    See :func:`refusals`.

    :raises AllReducedError: it would not, and this is what the start would raise.
    """
    read = Read()
    for error in refusals(node, settings, had=had, read=read):
        raise error
    return read


def refusals(
    node: str, settings: Settings, *, had: Settings | None = None, read: Read | None = None
) -> Iterator[AllReducedError]:
    """Yield each reason for which a start would be refused, the start's own first.

    Blocks: it reads files, asks for names, and tries what it can. Not on a thread whose event loop runs.
    ``had``: settings of an agent that runs; what it got from this machine (RDMA, threads, addresses, its socket) is not
    tried again where they say the same, for it may be away for the moment. ``read``: gets what was read.
    """
    for step in (*_always(node, settings, read or Read()), *_trials(settings, had)):
        try:
            step()
        except AllReducedError as error:
            yield error


def _always(node: str, settings: Settings, read: Read) -> Iterator[_Step]:
    yield lambda: _check_node(node)
    yield lambda: _check_peers(node, settings)
    yield lambda: loop_factory(settings.agent.loop)
    yield lambda: _read_secret(settings, read)
    yield lambda: _read_certificates(node, settings, read)
    yield lambda: access_from(settings.access, os.geteuid())
    yield lambda: socket_group(settings.access)
    yield lambda: _check_services(settings)


def _trials(settings: Settings, had: Settings | None) -> Iterator[_Step]:
    if had is None or _for_rdma(settings) != _for_rdma(had):
        yield lambda: _try_rdma(settings)
    if had is None or settings.engine != had.engine:
        yield lambda: _try_threads(settings)
    if settings.agent.socket and (had is None or settings.agent.socket != had.agent.socket):
        yield lambda: check_place(settings.agent.socket)
    if had is None or settings.access.socket_group != had.access.socket_group:
        yield lambda: _try_group(settings)
    if had is None or settings.metrics != had.metrics:
        yield lambda: asyncio.run(_try_metrics(settings))
    if had is None or (settings.peers, settings.security) != (had.peers, had.security):
        yield lambda: asyncio.run(_check_address(settings))
    if had is None or listening(settings) != listening(had):
        yield lambda: asyncio.run(_try_address(settings))


# Of the settings, and the files that they name


def _check_node(node: str) -> None:
    """Refuse a host's name that no agent can have; the settings' own is looked at where they are read."""
    message = wrong_node_name(node)
    if message:
        raise ConfigError(f"the name of this host: {message}", path="agent.node", hint=NODE_NAMES)


def _check_peers(node: str, settings: Settings) -> None:
    """Refuse what settings do not tell where the host's name is this agent's."""
    if any(peer.node == node for peer in settings.peers.static):
        raise ConfigError(
            f"{node!r} is listed among the peers, and is this agent itself",
            path="peers.static",
            hint="list the other agents only, or give this one another agent.node",
        )


def _read_secret(settings: Settings, read: Read) -> None:
    read.secret = secret_bytes(settings)


def _read_certificates(node: str, settings: Settings, read: Read) -> None:
    files = files_of(settings.security)
    read.certificates = None if files is None else load_certificates(files, node)


def _check_services(settings: Settings) -> None:
    if settings.peers.dns:
        name = parse_name(settings.peers.dns)
        if not name.port:
            check_services(name.host)


# Of this machine


def _for_rdma(settings: Settings) -> tuple[object, ...]:
    return settings.peers.transport, settings.rdma, settings.limits.arena_bytes, settings.engine.tile_bytes


def _try_rdma(settings: Settings) -> None:
    wanted = settings.peers.transport
    if wanted == "rdma":  # the only one that is refused
        decide(wanted, examine(settings, settings.limits.arena_bytes or default_total()).findings)


def _try_threads(settings: Settings) -> None:
    engine = settings.engine
    native_kernels(reduction_threads(engine), engine.cpus, engine.nice).close()


def _try_group(settings: Settings) -> None:
    """Give a file in memory to the group: who may do that may give it a socket."""
    try:
        group = socket_group(settings.access)
    except ConfigError:
        return  # told already
    if group < 0:
        return
    descriptor = os.memfd_create("allreduced-group", os.MFD_CLOEXEC)
    try:
        os.fchown(descriptor, -1, group)
    except OSError as error:
        raise ConfigError(
            f"the socket cannot be given to the group with gid {group}: {error.strerror}",
            path="access.socket_group",
            hint="make the agent's user a member of that group, or choose one that it is in",
        ) from error
    finally:
        os.close(descriptor)


async def _try_metrics(settings: Settings) -> None:
    if not settings.metrics.listen:
        return
    check_libraries()
    address = listen_address(settings.metrics.listen)
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(asyncio.Protocol, address.host, address.port, start_serving=False)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise cannot_listen(address, error) from error
    else:
        server.close()


async def _check_address(settings: Settings) -> None:
    """Look whether who can reach this agent must prove that it belongs, and whether it tells others a right address."""
    targets = [peer.address for peer in settings.peers.static]
    place = listening(settings)
    if not place or any(text.startswith("inproc://") for text in (place, *targets)):
        return
    where, security = parse_address(place, path="peers.listen", any_port=True), settings.security
    guarded = bool(security.secret or security.secret_file) or security.mode == "mtls"
    try:
        async with asyncio.timeout(NAMES_SECONDS):
            check_access(where, local=await stays_here(where), guarded=guarded, insecure=security.insecure)
            if settings.peers.advertise or not is_wildcard(where.host):  # else the network tells the address
                await advertised(where, settings.peers.advertise, targets)
    except TimeoutError:
        return


async def _try_address(settings: Settings) -> None:
    place = listening(settings)
    if not place or place.startswith("inproc://"):
        return
    where = parse_address(place, path="peers.listen", any_port=True)
    try:
        async with asyncio.timeout(NAMES_SECONDS):
            (await bound(f"tcp://{where.host_port}")).close()
    except TimeoutError:
        return
    except ConfigError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
            raise
