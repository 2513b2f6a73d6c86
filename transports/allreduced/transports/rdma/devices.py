"""Which device, port and GID a link uses, as pure functions of what there is and what is wanted.

Nothing is guessed: the GID of a link is the address through which the peer is reached, so that data goes the way that
the control flow has proven; or the settings name it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from allreduced.core.errors import ConfigError
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.verbs_port import DeviceInfo, GidEntry, GidKind, LinkLayer, LocalPort, PortInfo

ROCE_OVERHEAD: Final = 96
"""Bytes of headers for which a RoCE port reserves room: an interface's MTU is that much more than the RDMA MTU."""

LISTED: Final = 8
"""GIDs that an error lists at most."""

_KINDS: Final[dict[GidKind, str]] = {"ib": "InfiniBand", "roce_v1": "RoCE v1", "roce_v2": "RoCE v2"}
_LAYERS: Final[dict[LinkLayer, str]] = {
    "infiniband": "InfiniBand",
    "ethernet": "Ethernet",
    "unknown": "an unknown link layer",
}


@dataclass(frozen=True, slots=True)
class _Place:
    device: DeviceInfo
    port: PortInfo

    def __str__(self) -> str:
        return f"{self.device.name} port {self.port.number}"


def choose(devices: Sequence[DeviceInfo], options: RdmaOptions, host: str, port_gid: bytes = b"") -> LocalPort:
    """Return the port and GID of this machine for a link whose control flow has the numeric address ``host`` here.

    In this order: what ``options`` name; the RoCE entry that is ``host``, version 2 before 1; the InfiniBand port whose
    GID is ``port_gid``, which the IPoIB interface with that address tells (``interfaces.port_gid``); of a device that
    is named, the only entry that can be meant. Link-local GIDs are taken only where ``options`` name device or index.

    :raises ConfigError: none fits; the message says what was looked for, and what there is.
    """
    places = _named(devices, options)
    if options.gid_index >= 0:
        place, entry = _at_index(places, options, host, port_gid)
    else:
        place, entry = _by_address(places, options, host, port_gid, _problems(devices))
    port = place.port
    if port.state != "active":
        raise ConfigError(
            f"{place} is {port.state}, not active",
            path="rdma",
            hint="see `rdma link` and the cable, switch or subnet manager of that port",
        )
    if options.mtu > port.active_mtu:
        raise ConfigError(
            f"rdma.mtu is {options.mtu}, and {place} has an active MTU of {port.active_mtu}",
            path="rdma.mtu",
            hint=_raise_mtu(port, entry, options.mtu),
        )
    return LocalPort(
        place.device.name,
        port.number,
        port.link_layer,
        entry,
        port.lid,
        options.mtu or port.active_mtu,
        port.max_message,
    )


def agree(local: LocalPort, options: RdmaOptions, *, layer: LinkLayer, kind: GidKind, gid: bytes, mtu: int) -> int:
    """Return the path MTU of a link whose other end said the rest about its port: the lower of both.

    :raises ConfigError: the two ports cannot reach each other, or ``options`` want an MTU that the peer's lacks.
    """
    here = f"{local.device} port {local.port}"
    if layer != local.link_layer:
        raise ConfigError(f"{here} is on {_LAYERS[local.link_layer]}, and the peer's port on {_LAYERS[layer]}")
    if kind != local.gid.kind:
        raise ConfigError(
            f"the GID of {here} is {_KINDS[local.gid.kind]}, and the peer's is {_KINDS[kind]}",
            path="rdma.gid_index",
            hint="both ends need the same: see `rdma link`, and set rdma.device and rdma.gid_index where they differ",
        )
    if kind == "roce_v2" and _is_ipv4(gid) != _is_ipv4(local.gid.gid):
        raise ConfigError(
            f"the GID of {here} is {gid_text(local.gid.gid)}, and the peer's is {gid_text(gid)}: not the same family",
            path="rdma.gid_index",
            hint="let both ends reach each other by addresses of one family",
        )
    if options.mtu > mtu:
        raise ConfigError(
            f"rdma.mtu is {options.mtu} here, and the peer's port has an MTU of {mtu}",
            path="rdma.mtu",
            hint="leave rdma.mtu out, which takes the lower of both, or raise the MTU at the peer and in between",
        )
    return min(local.mtu, mtu)


def path_text(local: LocalPort, mtu: int) -> str:
    """Return what carries the data of a link, for ``Link.data_path``."""
    return (
        f"rdma {local.device} port {local.port}, GID {local.gid.index} ({gid_text(local.gid.gid)},"
        f" {_KINDS[local.gid.kind]}), MTU {mtu}"
    )


def gid_of(host: str) -> bytes:
    """Return the GID that stands for a numeric address; IPv4 in its mapped form, a scope is left out."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return address.packed if address.version == 6 else b"\0" * 10 + b"\xff\xff" + address.packed


def gid_text(gid: bytes) -> str:
    """Return a GID as people write it: an IPv4 address where it stands for one."""
    address = ipaddress.IPv6Address(gid)
    return str(address.ipv4_mapped or address)


def is_link_local(gid: bytes) -> bool:
    """Return whether a GID means something on one link only: fe80::/10, or the mapped 169.254.0.0/16."""
    address = ipaddress.IPv6Address(gid)
    return (address.ipv4_mapped or address).is_link_local


# What the settings name


def _named(devices: Sequence[DeviceInfo], options: RdmaOptions) -> list[_Place]:
    """Return the ports that may be used, of all or of the named device."""
    if not devices:
        raise ConfigError("this machine has no RDMA device", path="rdma", hint="`rdma link` lists those that there are")
    if options.device:
        devices = [device for device in devices if device.name == options.device] or _no_device(devices, options.device)
    usable = [device for device in devices if not device.problem]
    if not usable:
        raise ConfigError(f"no RDMA device can be used: {_problems(devices)}", path="rdma")
    places = [_Place(device, port) for device in usable for port in device.ports]
    if options.port:
        numbers = [place for place in places if place.port.number == options.port]
        if not numbers:
            there = ", ".join(map(str, places)) or "none"
            raise ConfigError(
                f"there is no port {options.port} of {options.device or 'any RDMA device'}; there are: {there}",
                path="rdma.port",
                hint="correct rdma.port, or leave it out",
            )
        places = numbers
    if not places:
        raise ConfigError(f"{', '.join(device.name for device in usable)} has no port", path="rdma.device")
    return places


def _problems(devices: Sequence[DeviceInfo]) -> str:
    return "; ".join(f"{device.name}: {device.problem}" for device in devices if device.problem)


def _no_device(devices: Sequence[DeviceInfo], name: str) -> list[DeviceInfo]:
    there = ", ".join(device.name for device in devices)
    raise ConfigError(
        f"there is no RDMA device {name!r}; there are: {there}",
        path="rdma.device",
        hint="correct rdma.device, or leave it out: then the address through which the peer is reached decides",
    )


def _at_index(places: Sequence[_Place], options: RdmaOptions, host: str, port_gid: bytes) -> tuple[_Place, GidEntry]:
    index = options.gid_index
    found = [(place, entry) for place in places for entry in _entries(place) if entry.index == index]
    if len(found) > 1:
        # The same index of several ports: the one through which the peer is reached, or one that is up.
        wanted = (gid_of(host), port_gid)
        nearer = [one for one in found if any(entry.gid in wanted for entry in one[0].port.gids)]
        nearer = nearer or [one for one in found if one[0].port.state == "active"]
        found = nearer or found
    if len(found) > 1:
        ports = ", ".join(str(place) for place, _ in found)
        raise ConfigError(
            f"rdma.gid_index is {index}, and several ports have such an entry: {ports}",
            path="rdma.gid_index",
            hint="name one with rdma.device and rdma.port",
        )
    if not found:
        raise ConfigError(
            f"no RDMA port has a GID with index {index}; there are: {_listed(places)}",
            path="rdma.gid_index",
            hint="correct rdma.gid_index, or leave it out",
        )
    return found[0]


# By address


def _by_address(
    places: Sequence[_Place], options: RdmaOptions, host: str, port_gid: bytes, problems: str
) -> tuple[_Place, GidEntry]:
    gid = gid_of(host)
    by_name = bool(options.device)
    found = [(place, entry) for place in places for entry in _entries(place) if _matches(place, entry, gid, port_gid)]
    if is_link_local(gid) and not by_name:
        found = []
    if found:
        # A port that is up first, then RoCE v2; else as the devices are listed.
        return min(found, key=lambda one: (one[0].port.state != "active", one[1].kind == "roce_v1"))
    if by_name:
        return _only_one(places, host)
    raise ConfigError(
        f"no GID of an RDMA device here is {host}, the address through which the peer is reached;"
        f" there are: {_listed(places)}{f'; {problems}' if problems else ''}",
        path="rdma",
        hint="let peers reach each other by an address of that network (peers.advertise), or name the port with"
        " rdma.device and rdma.gid_index",
    )


def _matches(place: _Place, entry: GidEntry, gid: bytes, port_gid: bytes) -> bool:
    return entry.gid == (port_gid if place.port.link_layer == "infiniband" else gid)


def _only_one(places: Sequence[_Place], host: str) -> tuple[_Place, GidEntry]:
    """Return the entry that can only be meant by who named a device that is not on the way of the control flow."""
    up = [place for place in places if place.port.state == "active"]
    for place in up:
        entries = list(_entries(place))
        if place.port.link_layer == "infiniband" and entries:
            return place, entries[0]  # the port's own, the subnet's prefix before it
        routable = [entry for entry in entries if entry.kind == "roce_v2" and not is_link_local(entry.gid)]
        if len(routable) == 1:
            return place, routable[0]
    if not up:
        states = ", ".join(f"{place} is {place.port.state}" for place in places)
        raise ConfigError(f"no port of the RDMA device is active: {states}", path="rdma.device", hint="see `rdma link`")
    raise ConfigError(
        f"no GID of {places[0].device.name} is {host}, the address through which the peer is reached, and which of"
        f" these is meant cannot be told: {_listed(places)}",
        path="rdma.gid_index",
        hint="set rdma.gid_index",
    )


def _entries(place: _Place) -> Iterable[GidEntry]:
    return (entry for entry in place.port.gids if any(entry.gid))


def _listed(places: Sequence[_Place]) -> str:
    """Return the GIDs that there are, as a list for people."""
    texts = [
        f"{place} GID {entry.index} {gid_text(entry.gid)} ({_KINDS[entry.kind]}"
        f"{', ' + entry.interface if entry.interface else ''}{', link-local' if is_link_local(entry.gid) else ''})"
        for place in places
        for entry in _entries(place)
    ]
    more = f", and {len(texts) - LISTED} more" if len(texts) > LISTED else ""
    return (", ".join(texts[:LISTED]) or "none") + more


def _is_ipv4(gid: bytes) -> bool:
    return ipaddress.IPv6Address(gid).ipv4_mapped is not None


def _raise_mtu(port: PortInfo, entry: GidEntry, mtu: int) -> str:
    if port.link_layer == "infiniband":
        return "leave rdma.mtu out, or raise the MTU of the fabric in the subnet manager (opensm: partitions.conf)"
    interface = entry.interface or "its interface"
    return f"leave rdma.mtu out, or: ip link set dev {interface} mtu {mtu + ROCE_OVERHEAD} (9000 is usual), all the way"
