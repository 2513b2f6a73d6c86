"""Addresses of links that are dialled by TCP: ``tcp://host:port``, with IPv6 addresses in brackets."""

from __future__ import annotations

import ipaddress

from allreduced.core.addresses import parse_address
from allreduced.core.errors import ConfigError
from allreduced.core.resolver import SockAddr

SCHEME = "tcp"


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
