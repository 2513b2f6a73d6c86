"""What this machine and process have of what RDMA needs, as the kernel tells it. pyverbs is not imported.

Nothing is read where the kernel has no RDMA device, which is what most machines are like.
"""

from __future__ import annotations

import importlib.util
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

_DEVICES: Final = Path("/sys/class/infiniband")
_FILES: Final = Path("/sys/class/infiniband_verbs")
_DEVICE_FILES: Final = Path("/dev/infiniband")
_CAP_IPC_LOCK: Final = 14
_WHOLE_RANGE: Final = ["0", "0", str((1 << 32) - 1)]

Access: TypeAlias = Literal["allowed", "denied", "missing"]


@dataclass(frozen=True, slots=True)
class HostDevice:
    """One RDMA device of the kernel. ``file``: through which programs use it, empty where the kernel offers none."""

    name: str
    file: str
    access: Access


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What RDMA needs of a machine. ``memlock``: bytes that this process may lock, None where there is no limit.

    ``binding``: whether the modules of pyverbs can be found: ``found``, ``missing``, or ``unknown`` where what is found
    is of no known generation. They are not loaded.
    """

    devices: tuple[HostDevice, ...]
    binding: Literal["found", "missing", "unknown"]
    memlock: int | None


def device_names(root: Path = _DEVICES) -> tuple[str, ...]:
    """Return the names of the kernel's RDMA devices. Cheap; empty on a machine without any."""
    try:
        return tuple(sorted(entry.name for entry in root.iterdir()))
    except OSError:
        return ()


def host_facts() -> HostFacts:
    """Return what there is now."""
    return HostFacts(host_devices(), binding(), memlock_limit())


def may_use(file: Path) -> bool:
    """Tell whether this process may read and write a file."""
    return os.access(file, os.R_OK | os.W_OK)


def host_devices(
    names: Path = _DEVICES,
    files: Path = _FILES,
    place: Path = _DEVICE_FILES,
    usable: Callable[[Path], bool] = may_use,
) -> tuple[HostDevice, ...]:
    """Return the devices, and whether this process may use their files."""
    file_of = {device: place / entry.name for device, entry in offered(files).items()}
    return tuple(_host_device(name, file_of.get(name), usable) for name in device_names(names))


def offered(files: Path = _FILES) -> dict[str, Path]:
    """Return the devices that the kernel offers to programs, by name, each with its entry below ``files``."""
    found = {}
    for name in device_names(files):
        try:
            found[(files / name / "ibdev").read_text(encoding="utf-8").strip()] = files / name
        except OSError:
            continue  # "abi_version" lies there too
    return found


def _host_device(name: str, file: Path | None, usable: Callable[[Path], bool]) -> HostDevice:
    if file is None:
        return HostDevice(name, "", "missing")
    try:
        file.stat()
    except PermissionError:  # of a folder on the way
        return HostDevice(name, str(file), "denied")
    except OSError:
        return HostDevice(name, str(file), "missing")
    return HostDevice(name, str(file), "allowed" if usable(file) else "denied")


def binding() -> Literal["found", "missing", "unknown"]:
    """Tell whether pyverbs can be found, without loading its libraries."""
    if importlib.util.find_spec("pyverbs") is None:
        return "missing"
    known = ("pyverbs.enums", "pyverbs.libibverbs_enums")
    return "found" if any(importlib.util.find_spec(name) is not None for name in known) else "unknown"


def memlock_limit() -> int | None:
    """Raise the limit on locked memory to what the system allows this process, and return it; None for no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass  # the lower one holds, and is what is told
    if soft == resource.RLIM_INFINITY or may_lock_all(_text("/proc/self/status"), _text("/proc/self/uid_map")):
        return None
    return soft


def may_lock_all(status: str, uid_map: str) -> bool:
    """Tell whether a process may lock memory beyond its limit, from its ``/proc/PID/status`` and ``uid_map``.

    It needs the capability CAP_IPC_LOCK in the first user namespace: that of a rootless container does not count.
    """
    if uid_map.split() != _WHOLE_RANGE:
        return False
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value.strip(), 16) >> _CAP_IPC_LOCK & 1)
    return False


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
