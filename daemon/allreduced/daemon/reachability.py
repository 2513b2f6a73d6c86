"""Which addresses this agent may listen at and tell others, and who must then prove that they belong."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from allreduced.core.addresses import Address, is_link_local, is_loopback, is_numeric, is_wildcard, parse_address
from allreduced.core.errors import AuthenticationError, ConfigError
from allreduced.core.resolver import look_up


def everywhere() -> str:
    """Return the host that stands for all interfaces of this machine, of IPv6 and IPv4 where it has both."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def same_host(address: str, remote: str) -> bool:
    """Tell whether ``address``, which a peer tells as its own, is on the host that its link comes from (``remote``).

    If so, who answers there is surely the peer. Behind a translation of addresses it may be anybody.
    """
    scheme, _, rest = address.partition("://")
    other_scheme, _, other = remote.partition("://")
    if "inproc" in (scheme, other_scheme):
        return scheme == other_scheme
    return rest.rpartition(":")[0] == other.rpartition(":")[0]  # whatever carries data, hosts are reached by IP


async def resolve(host: str) -> tuple[str, ...]:
    """Return the numeric addresses of a host, best first; empty if it is not known (yet)."""
    if is_numeric(host):
        return (host,)
    try:
        found = await look_up(host, 0)
    except OSError:
        return ()
    return tuple(dict.fromkeys(address[0] for _, address in found))


async def source_address(host: str) -> str:
    """Return this machine's address on the route to ``host``. No packet is sent.

    :raises ConfigError: there is no such host or no route to it.
    """
    addresses = await resolve(host)
    reason = "the name is not known"
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError as error:
                reason = error.strerror or str(error)
                continue
            return str(probe.getsockname()[0])
    raise ConfigError(f"there is no way to {host}: {reason}", hint="check the address, and this machine's network")


async def known_as_loopback(host: str) -> bool:
    """Tell whether this machine takes the name for its loopback, while others may know another address for it.

    Debian's installer writes the machine's own name to ``/etc/hosts`` as 127.0.1.1. ``localhost`` and numbers mean the
    same everywhere.
    """
    if is_loopback(host) or is_numeric(host):
        return False
    found = await resolve(host)
    return bool(found) and all(is_loopback(numeric) for numeric in found)


async def stays_here(address: Address) -> bool:
    """Tell whether only processes of this machine can reach the address, names looked up."""
    if is_loopback(address.host):
        return True
    found = await resolve(address.host)
    return bool(found) and all(is_loopback(numeric) for numeric in found)


def check_access(address: Address, *, local: bool, guarded: bool, insecure: bool) -> None:
    """Check that others who can reach the address must prove that they belong.

    ``guarded``: they must, by a secret or a certificate.

    :raises AuthenticationError: it is reachable from outside, and there is neither that nor leave to go without.
    """
    if local or guarded or insecure:
        return
    everywhere = " (all interfaces)" if is_wildcard(address.host) else ""
    raise AuthenticationError(
        f"{address}{everywhere} can be reached from other machines, and there is no shared secret",
        hint="set the same ALLREDUCED_SECRET on all nodes, or give them certificates (security.mode), or set"
        " ALLREDUCED_INSECURE=1 in a network that you trust",
    )


async def advertised(listening: Address, configured: str, targets: Sequence[str]) -> str:
    """Return where others may dial this agent; empty if that is not known.

    ``listening``: where it listens; ``configured``: what the settings say, may be empty; ``targets``: whom it dials.

    :raises ConfigError: peers are on other machines, and only this one, or only one link, can reach the address.
    """
    remote = [target for target in map(parse_address, targets) if not await stays_here(target)]
    if configured:
        address = parse_address(configured, path="peers.advertise", scheme=listening.scheme)
    elif is_wildcard(listening.host):
        if not remote:
            return ""
        address = Address(listening.scheme, await source_address(remote[0].host), listening.port)
    else:
        address = listening
    if is_wildcard(address.host):
        raise ConfigError(
            f"{address} cannot be dialled", path="peers.advertise", hint="give an address of this machine"
        )
    if remote and await stays_here(address):
        raise ConfigError(
            f"this agent would tell others to dial {address}, which is themselves; {remote[0]} is another machine",
            path="peers.advertise",
            hint="listen at an address that the other machines can reach, or set peers.advertise to one",
        )
    if remote and is_link_local(address.host):
        raise ConfigError(
            f"this agent would tell others to dial {address}, which means something on one link only",
            path="peers.advertise",
            hint="set peers.advertise to an address that all machines can reach",
        )
    return str(address)
