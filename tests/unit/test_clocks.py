"""Time is measured on monotonic clocks only: a clock that is set must never be a failure, or hide one."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
WALL = {"time", "time_ns", "ctime", "localtime", "gmtime", "now", "utcnow", "today"}
ALLOWED = {
    "daemon/allreduced/cli/certs.py": ["now", "now"],
    "daemon/allreduced/daemon/credentials.py": ["time", "gmtime"],
    "daemon/allreduced/daemon/doctor/security.py": ["time"],
    "daemon/allreduced/daemon/parts.py": ["time_ns"],
}
"""The dates of certificates, which everybody's calendar checks; and the number of an agent's start, which only orders
starts."""


def wall_clocks(path: Path) -> list[str]:
    """Return the calls in a module that ask for the time of day."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in WALL and isinstance(node.value, ast.Name):
            if node.value.id in ("time", "datetime", "date"):
                found.append(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            found += [alias.name for alias in node.names if alias.name in WALL]
    return found


def test_nothing_asks_for_the_time_of_day() -> None:
    found = {}
    for root in ("core", "transports", "client", "daemon"):
        for path in sorted((ROOT / root).rglob("*.py")):
            if calls := wall_clocks(path):
                found[str(path.relative_to(ROOT))] = calls
    assert found == ALLOWED
