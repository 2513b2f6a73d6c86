"""Names looked up in DNS and the hosts file: the addresses of a name, or the places of a service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from allreduced.core.errors import ConfigError
from allreduced.core.resolver import look_up

Places: TypeAlias = "tuple[tuple[str, int], ...]"
"""Numeric addresses and ports, each once."""
Lookup: TypeAlias = "Callable[[str, int], Awaitable[Places]]"
"""Finds the places behind a name; the port is that of all its addresses, or 0 for a service, which tells its own."""

SERVICE_SECONDS = 10.0
"""How long a question for a service may take; the system's resolver has its own limits."""


class NameUnknown(Exception):
    """A name is not known now, or nobody who knows could be asked; the text says which."""


async def addresses_of(name: str, port: int) -> Places:
    """Return the A and AAAA records of ``name``, or what the hosts file says, with ``port``.

    :raises NameUnknown: there are none.
    """
    try:
        found = await look_up(name, port)
    except OSError as error:
        raise NameUnknown(error.strerror or str(error)) from error
    return tuple(dict.fromkeys((address[0], port) for _, address in found))


def check_services(service: str) -> None:
    """Check that the records of a service can be asked for.

    :raises ConfigError: the package dnspython is missing.
    """
    try:
        import dns.asyncresolver  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"to look up the service {service}, the package dnspython is needed, and it is not installed",
            path="peers.dns",
            hint="pip install 'allreduced[dns]'; or give name:port, which needs addresses (A, AAAA) only",
        ) from None


async def places_of(service: str, port: int) -> Places:
    """Return the addresses and ports that the SRV records of ``service`` lead to. ``port`` is not used.

    :raises NameUnknown: there are no such records, they say that there is no such service, or none of their names is
        known.
    :raises ConfigError: the package dnspython is missing.
    """
    check_services(service)
    import dns.asyncresolver
    import dns.exception
    import dns.name
    import dns.rdtypes.IN.SRV

    try:
        answer = await dns.asyncresolver.resolve(service, "SRV", search=True, lifetime=SERVICE_SECONDS)
    except dns.exception.DNSException as error:
        raise NameUnknown(str(error)) from error
    except OSError as error:
        raise NameUnknown(error.strerror or str(error)) from error
    records = [record for record in answer if isinstance(record, dns.rdtypes.IN.SRV.SRV)]
    if len(records) == 1 and records[0].target == dns.name.root:
        raise NameUnknown("its record says that there is no such service")  # RFC 2782: the target is "."
    found: dict[tuple[str, int], None] = {}
    unknown: list[str] = []
    for record in records:
        name = record.target.to_text(omit_final_dot=True)
        try:
            found |= dict.fromkeys(await addresses_of(name, record.port))
        except NameUnknown as error:
            unknown.append(f"{name}: {error}")
    if not found:
        raise NameUnknown("; ".join(unknown[:3]) or "it has no places")
    return tuple(found)
