"""Compare ours with Gloo and with physical limits, side by side in one run, and print one table.

``make bench`` and ``make bench-quick`` run it. Only the ratios mean anything on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.rows import ROWS, Limit, Row

ROOT = Path(__file__).parent.parent
AGENT_MEMORY_GOAL = 100 << 10


@dataclass(slots=True)
class Measured:
    """Medians in seconds; None where nothing was measured."""

    ours: float | None = None
    gloo: float | None = None
    limit: float | None = None
    note: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer calls: about two minutes")
    parser.add_argument("--rows", default=",".join(row.key for row in ROWS), help="keys of rows, by commas")
    parser.add_argument("--limits", type=Path, default=ROOT / "build" / "limits", help="where the C programs are")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    arguments = parser.parse_args()
    keys = arguments.rows.split(",")
    rows = [row for row in ROWS if row.key in keys]
    measured: dict[str, Measured] = {row.key: Measured() for row in rows}
    memory: dict[str, int] = {}
    for (nodes, ranks), group in groupby(rows, key=lambda row: (row.nodes, row.ranks_per_node)):
        some = list(group)
        _limits(some, measured, arguments.limits, quick=arguments.quick)
        memory[f"{nodes} x {ranks}"] = _job(some, measured, nodes, ranks, quick=arguments.quick)
        _limits(some, measured, arguments.limits, quick=arguments.quick)
    if arguments.json:
        print(json.dumps({key: _as_json(value) for key, value in measured.items()} | {"agent_kib": memory}))
        return
    for line in table(rows, measured, memory):
        print(line)


def _as_json(value: Measured) -> dict[str, float | str | None]:
    return {"ours": value.ours, "gloo": value.gloo, "limit": value.limit, "note": value.note}


def _limits(rows: list[Row], measured: dict[str, Measured], programs: Path, *, quick: bool) -> None:
    """Measure before and after the job; the faster of the two counts."""
    for row in rows:
        if row.limit is not None:
            seconds = limit(row.limit, programs, quick=quick)
            known = measured[row.key].limit
            measured[row.key].limit = seconds if known is None else min(known, seconds)


def limit(wanted: Limit, programs: Path, *, quick: bool) -> float:
    """Return the median of the fastest variant."""
    iterations = (2000 if quick else 10000) if wanted.program == "server" else (9 if quick else 21)
    command = [str(programs / wanted.program), *wanted.arguments, str(iterations)]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return min(float(json.loads(line)["seconds"]) for line in lines)


def _job(rows: list[Row], measured: dict[str, Measured], nodes: int, ranks: int, *, quick: bool) -> int:
    """Run the ranks that measure these rows; return KiB of the larger agent."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "allreduced.cli.main", "run", "--nodes", str(nodes)]
        command += ["--ranks-per-node", str(ranks), "--", sys.executable, "-m", "benchmarks.rank"]
        command += ["--rows", ",".join(row.key for row in rows), "--results", str(results)]
        command += ["--quick"] if quick else []
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=sys.stderr)
        found = json.loads(results.read_text())
    for row in rows:
        if "error" in found[row.key]:
            measured[row.key].note = found[row.key]["error"]
        else:
            measured[row.key].ours = statistics.median(found[row.key]["ours"])
            measured[row.key].gloo = statistics.median(found[row.key]["gloo"])
    return int(found["agent_kib"])


def table(rows: list[Row], measured: dict[str, Measured], memory: dict[str, int]) -> list[str]:
    """Return the lines of the table."""
    heading = ("row", "ours ms", "Gloo ms", "limit ms", "Gloo/ours", "ours/limit", "goal", "")
    lines: list[tuple[str, ...]] = [heading]
    for row in rows:
        found = measured[row.key]
        goals, met = _goals(row, measured)
        lines.append(
            (
                row.title,
                _number(found.ours, 1e3),
                _number(found.gloo, 1e3),
                _number(found.limit, 1e3),
                _number(_ratio(found.gloo, found.ours)),
                _number(_ratio(found.ours, found.limit)),
                goals,
                found.note or met,
            )
        )
    for place, kib in memory.items():
        verdict = "met" if kib < AGENT_MEMORY_GOAL else "missed"
        title = f"{place}, agent memory beside shared arenas: {kib / 1024:.0f} MiB"
        lines.append((title, "-", "-", "-", "-", "-", "< 100 MiB", verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _goals(row: Row, measured: dict[str, Measured]) -> tuple[str, str]:
    found = measured[row.key]
    goals: list[str] = []
    met: list[bool] = []
    if row.against_gloo:
        goals.append(f"Gloo >= {row.against_gloo:g}x")
        met.append((_ratio(found.gloo, found.ours) or 0.0) >= row.against_gloo)
    if row.within:
        goals.append(f"<= {row.within:g}x limit")
        met.append((_ratio(found.ours, found.limit) or float("inf")) <= row.within)
    if row.against_row:
        other = measured.get(row.against_row, Measured())
        ratio = _ratio(other.ours, found.ours)
        goals.append(f"float32 >= {row.against_ours:g}x ({_number(ratio)})")
        met.append((ratio or 0.0) >= row.against_ours)
    return ", ".join(goals) or "-", ", ".join("met" if one else "missed" for one in met) or "-"


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _number(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.3g}" if value * scale < 100 else f"{value * scale:.0f}"


if __name__ == "__main__":
    main()
