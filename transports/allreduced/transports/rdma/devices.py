"""Which device, port and GID a link uses, as a pure function of what there is and what is wanted."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from allreduced.core.errors import ConfigError
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.verbs_port import DeviceInfo, LocalPort


def choose(devices: Sequence[DeviceInfo], options: RdmaOptions, host: str) -> LocalPort:
    """Return the port and GID of this machine for a link whose control flow has the numeric address ``host`` here.

    :raises ConfigError: none fits; the message says what was looked for, and what there is.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    gid = address.packed if address.version == 6 else b"\0" * 10 + b"\xff\xff" + address.packed
    for device in devices:
        for port in device.ports:
            for entry in port.gids:
                if entry.gid == gid and entry.kind == "roce_v2" and port.state == "active":
                    mtu = min(port.active_mtu, options.mtu or port.active_mtu)
                    return LocalPort(device.name, port.number, port.link_layer, entry, port.lid, mtu, port.max_message)
    raise ConfigError(f"no RDMA device of this machine has a GID for {host}")
