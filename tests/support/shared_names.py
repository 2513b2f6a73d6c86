"""Names in /dev/shm that a test has left behind: those of other processes on this machine are none of its own."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Set
from pathlib import Path
from typing import Final

FOLDER: Final = Path("/dev/shm")
SECONDS: Final = 2.0
"""In which names go that another process has only for a moment, as ``sem_open`` does of the C library."""

_MAPPED: Final = re.compile(r"(/dev/shm/\S+)")


def shared_names() -> frozenset[Path]:
    """Return the names that there are."""
    return frozenset(FOLDER.iterdir())


def left_behind(before: Set[Path], seconds: float = SECONDS) -> frozenset[Path]:
    """Return names that are new since ``before``, stay, and are not in use by another process."""
    until = time.monotonic() + seconds
    new = shared_names() - before
    while new and (new := new - _used_elsewhere()) and time.monotonic() < until:
        time.sleep(0.02)
        new &= shared_names()  # others may come and go meanwhile
    return new


def _used_elsewhere() -> frozenset[Path]:
    """Return the names that other processes have mapped."""
    found: set[str] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            try:
                found.update(_MAPPED.findall((process / "maps").read_text()))
            except OSError:
                continue  # it has ended, or is another user's
    return frozenset(map(Path, found))
