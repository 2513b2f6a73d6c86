"""Whether RDMA can be used here, what stands in its way, and which devices, ports and GIDs there are."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from allreduced.daemon.doctor.finding import Finding, note, ok, problem, warning
from allreduced.daemon.memory_share import default_total
from allreduced.daemon.rdma_use import Examined, examine
from allreduced.daemon.settings import Settings
from allreduced.transports.rdma.host import device_names, memlock_limit
from allreduced.transports.rdma.verbs_port import DeviceInfo, GidEntry, GidKind, PortInfo

_SUBJECT: Final = "RDMA"
_KINDS: Final[dict[GidKind, str]] = {"ib": "InfiniBand", "roce_v1": "RoCE v1", "roce_v2": "RoCE v2"}


@dataclass(frozen=True, slots=True)
class RdmaFacts:
    """What there is. ``transport``: the setting ``peers.transport``. ``names``: the kernel's devices.

    ``memlock``: bytes that this process may lock, None for no limit. ``examined``: None where the setting is ``tcp``.
    """

    transport: str
    names: tuple[str, ...]
    memlock: int | None
    examined: Examined | None


def rdma_facts(settings: Settings) -> RdmaFacts:
    """Look at the devices, without disturbing who uses them."""
    transport = settings.peers.transport
    examined = None if transport == "tcp" else examine(settings, settings.limits.arena_bytes or default_total())
    return RdmaFacts(transport, device_names(), memlock_limit(), examined)


def judge_rdma(facts: RdmaFacts) -> Iterator[Finding]:
    """Yield what is to be said about RDMA. Pure."""
    if facts.examined is None:
        if facts.names:
            text = (
                f"peers.transport is tcp, so that the devices of this machine ({', '.join(facts.names)}) are not used"
            )
            yield note(_SUBJECT, text, "set peers.transport to auto where the other machines have such devices too")
        else:
            yield note(_SUBJECT, "peers.transport is tcp, and this machine has no RDMA device")
        return
    for one in facts.examined.findings:
        subject = "memlock" if one.subject == "memlock" else _SUBJECT
        if one.subject == "absent" and facts.transport == "auto":
            yield note(subject, one.message)
        elif one.serious and facts.transport == "rdma":
            yield problem(subject, one.message, one.hint)
        else:
            yield warning(subject, one.message, one.hint)
    if facts.names and not any(one.subject == "memlock" for one in facts.examined.findings):
        most = "any amount" if facts.memlock is None else f"{facts.memlock >> 20} MiB"
        yield ok("memlock", f"this process may lock {most} of memory")
    if not facts.examined.findings:
        yield ok(_SUBJECT, "devices, their files, pyverbs and the limits are as they should be")
    for device in facts.examined.devices:
        for port in device.ports:
            yield ok(_SUBJECT, _described(device, port))


def _described(device: DeviceInfo, port: PortInfo) -> str:
    gids = "; ".join(_gid(entry) for entry in port.gids) or "none"
    where = f"{device.name} port {port.number}"
    return f"{where}: {port.state}, link layer {port.link_layer}, MTU {port.active_mtu}; GIDs: {gids}"


def _gid(entry: GidEntry) -> str:
    address = ipaddress.IPv6Address(entry.gid)
    on = f", {entry.interface}" if entry.interface else ""
    return f"{entry.index} {address.ipv4_mapped or address} ({_KINDS[entry.kind]}{on})"
