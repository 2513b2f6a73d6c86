"""Which process is which, out of the process table: identities that outlive the use of a pid for another process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def process_identity(pid: int) -> str:
    """Return ``pid`` with its start time, which together no other process of this boot has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        start = stat.rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        start = "0"
    return f"{pid}-{start}"


def launcher_identity(telling: tuple[str, ...]) -> str:
    """Return the identity of the nearest ancestor that is not a wrapper around this rank.

    A shell or a debugger between the launcher and the rank has the rank's own values of the ``telling`` variables;
    the launcher has not. Processes that cannot be looked into count as launchers.
    """
    mine = {name.encode(): os.environ.get(name, "").encode() for name in telling}
    pid = os.getppid()
    while pid > 1 and mine and _has_values(pid, mine):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
            parent = int(stat.rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            break
        if parent <= 1:
            break
        pid = parent
    return process_identity(pid)


def _has_values(pid: int, values: Mapping[bytes, bytes]) -> bool:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    found = dict(entry.split(b"=", 1) for entry in raw.split(b"\0") if b"=" in entry)
    return all(found.get(name) == value for name, value in values.items())
