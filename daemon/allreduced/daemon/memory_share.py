"""How much memory this process may use, from what the kernel's files say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeAlias

ReadFile: TypeAlias = "Callable[[str], str | None]"
"""Returns the content of a file, or None where it does not exist or cannot be read."""

DEFAULT_SHARE = 0.5
"""Part of the usable memory that all arenas may take together where nothing else is configured."""


def read_file(path: str) -> str | None:
    """Return the content of a file of ``/proc`` or ``/sys``, or None."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return None


def usable_memory(read: ReadFile = read_file) -> int:
    """Return the bytes that this process may use: its control group's limit, else the memory of the machine.

    Limits of all levels above the own control group hold too. A pure function of what ``read`` returns.
    Falls back to 1 GiB where the machine tells nothing at all.
    """
    found = [limit for path in _limit_files(read) if (limit := _bytes(read(path))) is not None]
    physical = _meminfo(read("/proc/meminfo"), "MemTotal")
    if physical is not None:
        found.append(physical)
    return min(found, default=1 << 30)


def default_total(read: ReadFile = read_file, share: float = DEFAULT_SHARE) -> int:
    """Return the bytes that all arenas may take together: ``share`` of :func:`usable_memory`."""
    return int(usable_memory(read) * share)


def available_memory(read: ReadFile = read_file) -> int | None:
    """Return the bytes that the machine could give now without swapping, or None where it does not tell."""
    return _meminfo(read("/proc/meminfo"), "MemAvailable")


def _limit_files(read: ReadFile) -> Iterator[str]:
    """Yield the files that may hold a limit of this process, version 2 of control groups first."""
    for line in (read("/proc/self/cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if hierarchy == "0" and not controllers:
            root, name = PurePosixPath("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = PurePosixPath("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        relative = PurePosixPath(group.lstrip("/"))
        # In a container the path may be the host's and not exist here; the mount's own root then has the limit.
        for level in (relative, *relative.parents):
            yield str(root / level / name)


def _bytes(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isdigit() else None


def _meminfo(text: str | None, wanted: str) -> int | None:
    for line in (text or "").splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            number = value.split()[0] if value.split() else ""
            return int(number) * 1024 if number.isdigit() else None
    return None
