"""Which network interface has an address, and which InfiniBand port is below it. Reads what the kernel tells.

RoCE ports list their addresses as GIDs. InfiniBand ports do not: there, IP is spoken by an IPoIB interface, and the
last 16 of the 20 bytes of its hardware address are the GID of the port (RFC 4391, 9.1.1).
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

ReadFile: TypeAlias = Callable[[str], str]
"""Returns the content of a file, empty where there is none."""

_SIOCGIFCONF: Final = 0x8912
_IFREQ: Final = struct.calcsize("16s24x")
"""Bytes of the kernel's ``struct ifreq`` on 64 bits: 16 of the name, then the address."""

_MOST: Final = 4096
"""Addresses that are looked at."""

_IPOIB_BYTES: Final = 20


def read_file(path: str) -> str:
    """Return the content of a file of ``/proc`` or ``/sys``, or an empty text."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def port_gid(host: str, read: ReadFile = read_file) -> bytes:
    """Return the GID of the InfiniBand port below the interface with this numeric address; empty where none is."""
    interface = interface_of(host, read)
    return gid_of_hardware(read(f"/sys/class/net/{interface}/address")) if interface else b""


def gid_of_hardware(text: str) -> bytes:
    """Return the GID inside an IPoIB hardware address as sysfs writes it; empty where it is of another kind."""
    try:
        address = bytes.fromhex(text.strip().replace(":", ""))
    except ValueError:
        return b""
    return address[4:] if len(address) == _IPOIB_BYTES else b""


def interface_of(host: str, read: ReadFile = read_file) -> str:
    """Return the name of the network interface that has this numeric address; empty where none has."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return interface_of_ipv6(read("/proc/net/if_inet6"), address)
        address = address.ipv4_mapped
    return _interfaces_of_ipv4().get(str(address), "")


def interface_of_ipv6(table: str, address: ipaddress.IPv6Address) -> str:
    """Return the interface with this address in the text of ``/proc/net/if_inet6``, or an empty text."""
    wanted = address.packed.hex()
    for line in table.splitlines():
        fields = line.split()
        if len(fields) == 6 and fields[0] == wanted:
            return fields[5]
    return ""


def _interfaces_of_ipv4() -> dict[str, str]:
    """Return the interface of each IPv4 address of this machine, second and further addresses too."""
    room = array.array("B", bytes(_IFREQ * _MOST))
    place, _ = room.buffer_info()
    request = struct.pack("iP", len(room), place)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFCONF, request)
        except OSError:  # a sandbox; InfiniBand must then be chosen by name, and the error of choose() says so
            return {}
    used: int = struct.unpack("iP", answer)[0]
    found = room.tobytes()[:used]
    interfaces = {}
    for at in range(0, used, _IFREQ):
        label = found[at : at + 16].split(b"\0", 1)[0].decode(errors="replace")
        # A further address may have a label of its own, such as ib0:1.
        interfaces[socket.inet_ntoa(found[at + 20 : at + 24])] = label.partition(":")[0]
    return interfaces
