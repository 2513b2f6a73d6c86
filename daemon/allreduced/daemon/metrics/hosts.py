"""For which host names the HTTP server answers, decided from the request's Host header.

A web page can make a browser ask this server if its own name points here (DNS rebinding). The header then has that
name, which is none of those below.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import Final

from allreduced.core.addresses import is_loopback

_NAME: Final = re.compile(r"[a-z0-9_.-]+")


def host_of(header: str) -> str | None:
    """Return the host that a Host header names, in lower case and without its port; None if it is malformed."""
    text = header.strip().lower()
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            return None
        try:
            host = str(ipaddress.IPv6Address(host))
        except ValueError:
            return None
        port = port[1:]
    else:
        host, _, port = text.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and len(port) <= 5)):
        return None
    return host.rstrip(".") or None


def host_named(text: str) -> str | None:
    """Return the host that a setting names, as :func:`host_of` returns it; None where no request can ask for it.

    An address of IPv6 may stand in brackets or without.
    """
    literal = text.strip()
    if ":" in literal and not literal.startswith("["):
        literal = f"[{literal}]"
    host = host_of(literal)
    if host is None or (literal.startswith("[") and not literal.endswith("]")):
        return None
    return host if literal.startswith("[") or _NAME.fullmatch(host) else None


def is_allowed(host: str, local: str, names: Collection[str]) -> bool:
    """Return whether requests for ``host`` are answered: loopback's names, ``local``, and ``names``.

    ``local``: the address that the connection came in at. ``names``: as :func:`host_named` returns them.
    """
    return is_loopback(host) or host == _canonical(local) or host in names


def _canonical(address: str) -> str:
    try:
        literal = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address.lower()
    return str(literal.ipv4_mapped or literal if isinstance(literal, ipaddress.IPv6Address) else literal)
