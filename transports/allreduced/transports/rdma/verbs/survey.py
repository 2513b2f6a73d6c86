"""What devices there are, with their ports and GIDs."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from allreduced.transports.rdma.verbs.binding import Modules, translated
from allreduced.transports.rdma.verbs.codes import GID_KINDS, LAYERS, STATES
from allreduced.transports.rdma.verbs_port import MTUS, DeviceInfo, GidEntry, PortInfo, VerbsError


def names(modules: Modules) -> list[str]:
    """Return the names of all devices.

    :raises VerbsError: they cannot be listed; pyverbs also says so where there is none.
    """
    with translated("cannot list the RDMA devices"):
        return [_text(device.name) for device in modules.device.get_device_list()]


def describe(modules: Modules, name: str) -> DeviceInfo:
    """Return a device as it is now, or why it cannot be opened."""
    try:
        with translated(f"RDMA device {name}"):
            context = modules.device.Context(name=name)
    except VerbsError as error:
        return DeviceInfo(name, (), problem=str(error))
    try:
        with translated(f"RDMA device {name}"):
            attributes = context.query_device()
            gids = list(_gids(context, attributes.phys_port_cnt))
            ports = tuple(_port(context, number, gids) for number in range(1, attributes.phys_port_cnt + 1))
            return DeviceInfo(
                name,
                ports,
                max_queue_pairs=attributes.max_qp,
                max_work_requests=attributes.max_qp_wr,
                max_completions=attributes.max_cqe,
                max_regions=attributes.max_mr,
                max_region_size=attributes.max_mr_size,
            )
    except VerbsError as error:
        return DeviceInfo(name, (), problem=str(error))
    finally:
        context.close()


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _value(attribute: Any) -> Any:
    """Return what one generation has as a method and another as a property."""
    return attribute() if callable(attribute) else attribute


def _gids(context: Any, ports: int) -> Iterator[tuple[int, GidEntry]]:
    """Yield port number and entry of every GID that is set."""
    lengths = {number: context.query_port(number).gid_tbl_len for number in range(1, ports + 1)}
    for entry in context.query_gid_table(sum(lengths.values())):
        interface = _value(entry.ndev_ifindex)
        try:
            name = socket.if_indextoname(interface) if interface else ""
        except OSError:
            name = ""  # gone, or of another network namespace
        gid = ipaddress.IPv6Address(_value(entry.gid_str)).packed
        kind = GID_KINDS.get(_value(entry.gid_type), "ib")
        yield _value(entry.port_num), GidEntry(_value(entry.gid_index), gid, kind, name)


def _port(context: Any, number: int, gids: Sequence[tuple[int, GidEntry]]) -> PortInfo:
    port = context.query_port(number)
    return PortInfo(
        number,
        STATES.get(port.state, "unknown"),
        LAYERS.get(port.link_layer, "infiniband" if port.lid else "unknown"),
        active_mtu=MTUS[port.active_mtu - 1] if 1 <= port.active_mtu <= len(MTUS) else MTUS[0],
        max_message=port.max_msg_sz,
        lid=port.lid,
        gids=tuple(entry for owner, entry in gids if owner == number),
    )
