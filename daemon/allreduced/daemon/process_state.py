"""What a process of this machine is doing, as far as the kernel tells."""

from __future__ import annotations

import enum
from pathlib import Path

PROC = Path("/proc")


class ProcessState(enum.Enum):
    """What a process does."""

    RUNNING = "running"
    """It runs, or sleeps until something happens."""
    STOPPED = "stopped"
    """By a signal, such as SIGSTOP."""
    TRACED = "traced"
    """Stopped by a debugger."""
    BLOCKED = "blocked"
    """It waits in the kernel and no signal reaches it: a disk, a network file system."""
    DEAD = "dead"
    """It ended, and its parent has not taken note of it."""
    UNKNOWN = "unknown"
    """It cannot be seen from here."""


_LETTERS = {
    "R": ProcessState.RUNNING,
    "S": ProcessState.RUNNING,
    "I": ProcessState.RUNNING,
    "D": ProcessState.BLOCKED,
    "T": ProcessState.STOPPED,
    "t": ProcessState.TRACED,
    "Z": ProcessState.DEAD,
    "X": ProcessState.DEAD,
}


def process_state(pid: int) -> ProcessState:
    """Return what the process does; UNKNOWN for pid 0, which is one of another pid namespace."""
    if pid <= 0:
        return ProcessState.UNKNOWN
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return ProcessState.UNKNOWN
    # The name in brackets may hold anything, brackets too.
    _, _, rest = text.rpartition(b")")
    return _LETTERS.get(rest[1:2].decode(errors="replace"), ProcessState.UNKNOWN)
