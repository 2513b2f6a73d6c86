"""What stands in the way of RDMA on this machine, each with the command that mends it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from allreduced.transports.rdma.endpoint import SEND_DEPTH, SEND_SLOTS
from allreduced.transports.rdma.host import HostDevice, HostFacts
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.verbs_port import DeviceInfo
from allreduced.transports.rdma.wire import HEADER

Subject: TypeAlias = Literal["absent", "device", "device_file", "binding", "memlock", "limits", "port"]
"""What a finding is about. ``absent``: there is no RDMA device at all, which is what most machines are like."""

MEMLOCK_HINT: Final = (
    "systemd: LimitMEMLOCK=infinity in the unit; a shell: ulimit -l unlimited; logins: '* - memlock unlimited' in"
    " /etc/security/limits.d/rdma.conf; Docker: --ulimit memlock=-1"
)
FILE_HINT: Final = (
    "Docker: --device /dev/infiniband; else: modprobe ib_uverbs, and let the agent's user read and write {file}, by a"
    ' group (udev: KERNEL=="uverbs*", GROUP="rdma", MODE="0660")'
)
BINDING_HINT: Final = (
    "Debian and Ubuntu: apt install python3-pyverbs (for the system's Python; a virtual environment needs"
    " --system-site-packages); others: docs/rdma.md"
)

FEW_REGIONS: Final = 1024
"""Memory regions of a device below which links may have to wait or fail."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What the links of this agent ask of devices. ``arenas``: bytes of all shared memory; ``tile``: of one tile.

    ``flows``: of a link. ``peers``: known so far.
    """

    arenas: int
    tile: int
    flows: int
    options: RdmaOptions
    peers: int = 0

    @property
    def depth(self) -> int:
        """Requests in one queue."""
        return max(self.options.depth, SEND_DEPTH)

    @property
    def completions(self) -> int:
        """Entries of one completion queue, which all flows of a link share."""
        return self.flows * (self.depth + 1)

    @property
    def least(self) -> int:
        """Bytes that links lock at least: pools for small messages, and a tile of each flow in each direction."""
        pools = self.flows * (self.options.depth + SEND_SLOTS) * (self.options.small + HEADER)
        return max(self.peers, 1) * (pools + 2 * self.flows * self.tile)

    @property
    def most(self) -> int:
        """Bytes that they lock at most: what is sent from stays registered, and counts for each peer."""
        return self.least + max(self.peers, 1) * self.arenas


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong. ``serious``: no link can use RDMA. ``hint``: what to do about it."""

    subject: Subject
    serious: bool
    message: str
    hint: str


def findings(host: HostFacts, devices: Sequence[DeviceInfo] | None, needs: Needs) -> tuple[Finding, ...]:
    """Return what is wrong, the serious first. ``devices``: as verbs tell of them, None where they could not be asked.

    Where a device is named, only that one counts.
    """
    found = list(_host_findings(host, needs))
    if devices is not None and not any(one.serious for one in found):
        found += _device_findings(devices, needs)
    return tuple(sorted(found, key=lambda one: not one.serious))


def _host_findings(host: HostFacts, needs: Needs) -> Iterator[Finding]:
    named = [device for device in host.devices if not needs.options.device or device.name == needs.options.device]
    if not named:
        yield _no_device(host.devices, needs.options.device)
        return
    shut = [device for device in named if device.access != "allowed"]
    for device in shut:
        yield _shut(device, serious=len(shut) == len(named))
    if host.binding == "missing":
        yield Finding("binding", True, "pyverbs is not installed for the Python that runs this agent", BINDING_HINT)
    elif host.binding == "unknown":
        yield Finding(
            "binding",
            True,
            "pyverbs is installed, but of a version that is not known here (rdma-core 44 to 59 are)",
            BINDING_HINT,
        )
    if host.memlock is None:
        return
    if host.memlock < needs.least:
        yield Finding(
            "memlock",
            True,
            f"this process may lock {_size(host.memlock)} of memory, and its links lock {_size(needs.least)} at least",
            MEMLOCK_HINT,
        )
    elif host.memlock < needs.most:
        yield Finding(
            "memlock",
            False,
            f"this process may lock {_size(host.memlock)} of memory, and its links may come to {_size(needs.most)}:"
            " what cannot be locked is copied into messages",
            f"{MEMLOCK_HINT}; or lower limits.arena_bytes",
        )


def _no_device(devices: Sequence[HostDevice], name: str) -> Finding:
    if not devices:
        return Finding(
            "absent",
            True,
            "this machine has no RDMA device",
            "see `rdma link`; load its driver (mlx5_ib, irdma, rdma_rxe …), or set peers.transport to tcp",
        )
    there = ", ".join(device.name for device in devices)
    return Finding("device", True, f"there is no RDMA device {name!r}; there are: {there}", "correct rdma.device")


def _shut(device: HostDevice, *, serious: bool) -> Finding:
    if device.access == "denied":
        message = f"this user may not read and write {device.file}, the file of the RDMA device {device.name}"
    elif device.file:
        message = f"{device.file}, the file of the RDMA device {device.name}, is not here"
    else:
        message = f"the kernel offers no file for the RDMA device {device.name}"
    return Finding("device_file", serious, message, FILE_HINT.format(file=device.file or "/dev/infiniband/uverbs*"))


def _device_findings(devices: Sequence[DeviceInfo], needs: Needs) -> Iterator[Finding]:
    named = [device for device in devices if not needs.options.device or device.name == needs.options.device]
    broken = [device for device in named if device.problem]
    for device in broken:
        yield Finding(
            "device",
            len(broken) == len(named),
            f"the RDMA device {device.name} cannot be opened: {device.problem}",
            "see `rdma link` and dmesg; is the provider library there (apt install ibverbs-providers)?",
        )
    usable = [device for device in named if not device.problem]
    short = {device.name: list(_limits(device, needs)) for device in usable}
    all_short = bool(usable) and all(any(serious for serious, _ in one) for one in short.values())
    for name, told in short.items():
        for serious, text in told:
            yield Finding(
                "limits", serious and all_short, f"the RDMA device {name} {text}", "see `ibv_devinfo -v`; docs/rdma.md"
            )
    up = [port for device in usable for port in device.ports if port.state == "active"]
    if usable and not up:
        states = ", ".join(
            f"{device.name} port {port.number} is {port.state}" for device in usable for port in device.ports
        )
        yield Finding("port", False, f"no RDMA port is active: {states or 'there is none'}", "see `rdma link`")


def _limits(device: DeviceInfo, needs: Needs) -> Iterator[tuple[bool, str]]:
    """Yield what a device lacks: whether it makes RDMA impossible, and in words."""
    if device.max_queue_pairs < needs.flows:
        yield True, f"has {device.max_queue_pairs} queue pairs, and one link takes {needs.flows} (peers.flows)"
    elif device.max_queue_pairs < needs.flows * needs.peers:
        pairs = needs.flows * needs.peers
        yield False, f"has {device.max_queue_pairs} queue pairs, and links to {needs.peers} peers take {pairs}"
    if device.max_work_requests < needs.depth:
        yield True, f"takes {device.max_work_requests} requests in a queue, and a link needs {needs.depth}"
    if device.max_completions < needs.completions:
        yield True, f"has completion queues of {device.max_completions} entries, and a link needs {needs.completions}"
    if device.max_regions < FEW_REGIONS:
        yield False, f"has {device.max_regions} memory regions: what cannot have one is copied into messages"
    if device.max_region_size < needs.arenas:
        most = _size(device.max_region_size)
        yield False, f"registers at most {most} at once: larger parts of tensors are copied into messages"


def _size(nbytes: int) -> str:
    """Return a number of bytes as people write it, rounded."""
    value = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{round(value, 1):g} {unit}"
        value /= 1024
    return f"{round(value, 1):g} TiB"
