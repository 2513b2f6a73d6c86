"""Addresses of links that are dialled by TCP: ``tcp://host:port``, with IPv6 addresses in brackets."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TypeAlias

from allreduced.core.addresses import is_numeric, parse_address
from allreduced.core.errors import ConfigError

SCHEME = "tcp"

SockAddr: TypeAlias = "tuple[str, int] | tuple[str, int, int, int]"


def parse(address: str, scheme: str = SCHEME) -> tuple[str, int]:
    """Return host and port of ``tcp://host:port``, or of another scheme that dials by TCP.

    :raises ConfigError: it is not of that form.
    """
    if not address.startswith(f"{scheme}://"):
        raise ConfigError(f"the address {address!r} is malformed: it does not begin with {scheme}://")
    parsed = parse_address(address, any_port=True)
    return parsed.host, parsed.port


def text(sockaddr: SockAddr, scheme: str = SCHEME) -> str:
    """Return ``scheme://host:port`` of a socket's address; an IPv4 address seen through IPv6 is written as IPv4."""
    host, port = sockaddr[0], sockaddr[1]
    if ":" in host:
        mapped = ipaddress.IPv6Address(host.partition("%")[0]).ipv4_mapped
        host = str(mapped) if mapped is not None else f"[{host}]"
    return f"{scheme}://{host}:{port}"


async def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, SockAddr]]:
    """Return the socket addresses of a host, best first. Numeric addresses need no resolver and no thread.

    :raises OSError: the name is not known.
    """
    if is_numeric(host):
        found = socket.getaddrinfo(  # AI_NUMERICHOST: no look-up, does not block
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
    else:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, _sockaddr(address)) for family, _, _, _, address in found]


def _sockaddr(address: tuple[object, ...]) -> SockAddr:
    host, port = str(address[0]), address[1]
    flow, scope = (address[2], address[3]) if len(address) == 4 else (None, None)
    if not isinstance(port, int):
        raise OSError(f"no TCP address: {address!r}")
    if isinstance(flow, int) and isinstance(scope, int):
        return host, port, flow, scope
    return host, port
