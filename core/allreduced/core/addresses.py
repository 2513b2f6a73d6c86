"""Addresses of agents (``tcp://host:port``) and of their local sockets (a path or ``@name``).

Parsing only: no name is looked up and no socket is opened here.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass

from allreduced.core.errors import ConfigError

SUN_PATH = 108
"""Bytes of a Unix socket's path on Linux, including the NUL at the end (or at the start of an abstract name)."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,31}")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class Address:
    """Where an agent listens. ``host`` is a name or a literal address, IPv6 without brackets; ``port`` 0 to 65535."""

    scheme: str
    host: str
    port: int

    @property
    def host_port(self) -> str:
        """``host:port``, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host_port}"


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """Where an agent's local socket is: a path, or ``@name`` for a Linux abstract socket, which leaves no file."""

    text: str

    @property
    def abstract(self) -> bool:
        """True for a name in the abstract namespace."""
        return self.text.startswith("@")

    @property
    def sockaddr(self) -> str:
        """What ``bind`` and ``connect`` of the ``socket`` module take."""
        return f"\0{self.text[1:]}" if self.abstract else self.text

    def __str__(self) -> str:
        return self.text


def parse_address(text: str, *, scheme: str = "tcp", path: str = "", any_port: bool = False) -> Address:
    """Return the address that ``text`` tells: ``scheme://host:port``, or ``host:port`` with the ``scheme`` given.

    IPv6 addresses stand in brackets, ``[::1]:4123``, and come back in their canonical form; names in lower case.
    ``any_port``: port 0 is allowed too (listening: the system chooses). ``path`` names the setting in errors.

    :raises ConfigError: it is malformed; the message says what is wrong with it.
    """
    found, separator, rest = text.partition("://")
    if not separator:
        found, rest = scheme, text
    if not _SCHEME.fullmatch(found):
        raise _malformed(text, f"{found!r} is no scheme", path)
    if rest.startswith("["):
        host, bracket, after = rest[1:].partition("]")
        if not bracket:
            raise _malformed(text, "the bracket of the IPv6 address is not closed", path)
        if not after.startswith(":"):
            raise _malformed(text, "it has no port", path)
        try:
            host = str(ipaddress.IPv6Address(host))
        except ValueError:
            raise _malformed(text, f"{host!r} is no IPv6 address", path) from None
        port = after[1:]
    else:
        host, colon, port = rest.rpartition(":")
        if not colon:
            raise _malformed(text, "it has no port", path)
        if ":" in host:
            raise _malformed(text, "an IPv6 address must stand in brackets", path)
        host = _host(text, host, path)
    return Address(found, host, _port(text, port, path, lowest=0 if any_port else 1))


def parse_socket(text: str, *, path: str = "") -> SocketAddress:
    """Return the address of a local socket: a path of the file system, or ``@name``.

    ``path`` names the setting or argument in errors.

    :raises ConfigError: it is empty, no file name, has a NUL in it, or is longer than the platform's ``sun_path``.
    """
    if text in ("", "@"):
        raise ConfigError("the socket is empty", path=path, hint="give a path, or @name for an abstract socket")
    if "\0" in text:
        raise ConfigError(f"the socket {text!r} has a NUL in it", path=path, hint="write abstract sockets as @name")
    # An abstract name has its NUL in the place of the "@", a path has one at its end.
    try:
        length = len(os.fsencode(text)) + (0 if text.startswith("@") else 1)
    except UnicodeEncodeError:
        raise ConfigError(f"the socket {text!r} cannot be a file name", path=path, hint="use plain text") from None
    if length > SUN_PATH:
        excess = length - SUN_PATH
        raise ConfigError(
            f"the socket {text!r} takes {length} bytes, {excess} more than the {SUN_PATH} that this platform allows",
            path=path,
            hint="use a shorter place, such as /run/allreduced/agent.sock or @allreduced",
        )
    return SocketAddress(text)


def is_loopback(host: str) -> bool:
    """Return True for literal loopback addresses and ``localhost``; other names are not looked up and are False."""
    if host.lower().rstrip(".") == "localhost":
        return True
    literal = _literal(host)
    return literal is not None and literal.is_loopback


def is_wildcard(host: str) -> bool:
    """Return True for ``0.0.0.0`` and ``::``: places to listen at, but not addresses to tell others."""
    literal = _literal(host)
    return literal is not None and literal.is_unspecified


def is_link_local(host: str) -> bool:
    """Return True for literal addresses that mean something on one link only (169.254.0.0/16, fe80::/10)."""
    literal = _literal(host)
    return literal is not None and literal.is_link_local


def is_numeric(host: str) -> bool:
    """Return True for literal addresses, also with a scope (``fe80::1%eth0``): nothing must be looked up."""
    return _literal(host) is not None


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        return None
    # ::ffff:127.0.0.1 is an IPv4 address in the clothes of the other family.
    return literal.ipv4_mapped or literal if isinstance(literal, ipaddress.IPv6Address) else literal


def _host(text: str, host: str, path: str) -> str:
    if not host:
        raise _malformed(text, "it has no host", path)
    labels = host.rstrip(".").split(".")
    if labels[-1].isdigit():
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise _malformed(text, f"{host!r} is no IPv4 address", path) from None
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise _malformed(text, f"{host!r} is no host name", path)
    return host.lower()


def _port(text: str, port: str, path: str, *, lowest: int) -> int:
    # isdigit() alone accepts digits of other scripts.
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and lowest <= int(port) <= 65535):
        raise _malformed(text, f"the port {port!r} is not a number from {lowest} to 65535", path)
    return int(port)


def _malformed(text: str, fact: str, path: str) -> ConfigError:
    return ConfigError(
        f"the address {text!r} is malformed: {fact}",
        path=path,
        hint="write scheme://host:port, such as tcp://10.0.0.1:4123 or tcp://[::1]:4123",
    )
