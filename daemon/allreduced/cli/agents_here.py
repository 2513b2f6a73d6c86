"""The agents of this machine that have no usual place: private ones, and those of ``allreduced run``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

TABLE = Path("/proc/net/unix")
PREFIX = "@allreduced-"
_LISTENS = 0x10000  # __SO_ACCEPTCON


def listening(table: Iterable[str]) -> list[str]:
    """Return the abstract sockets of agents among the lines of ``/proc/net/unix``, sorted."""
    found = set()
    for line in table:
        words = line.split(maxsplit=7)
        if len(words) == 8 and words[7].startswith(PREFIX) and _is_listener(words[3]):
            found.add(words[7].rstrip("\n"))
    return sorted(found)


def agents_here() -> list[str]:
    """Return the abstract sockets of agents in this network namespace, in the form of ``--socket``."""
    try:
        return listening(TABLE.read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError:
        return []


def _is_listener(flags: str) -> bool:
    try:
        return bool(int(flags, 16) & _LISTENS)
    except ValueError:
        return False
