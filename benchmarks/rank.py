"""One rank of the comparison, started by ``compare.py`` through ``allreduced run``: ours and Gloo in turns.

Before and after each call there is a barrier of the library under test; what counts for a call is its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from benchmarks.count import agent_pid
from benchmarks.rows import ROWS, Gloo, Row

from allreduced.client import Communicator, connect
from allreduced.core.errors import AllReducedError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", required=True, help="keys of the rows, by commas")
    parser.add_argument("--results", type=Path, required=True, help="file that rank 0 writes")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    keys = arguments.rows.split(",")
    gloo = Gloo()
    results: dict[str, object] = {}
    with connect() as comm:
        for row in ROWS:
            if row.key in keys:
                results[row.key] = compare(row, comm, gloo, quick=arguments.quick)
        memory = np.array([agent_memory()], np.int64)
        results["agent_kib"] = int(comm.all_reduce(memory, op="max")[0])
        if comm.rank == 0:
            arguments.results.write_text(json.dumps(results))
    gloo.close()


def compare(row: Row, comm: Communicator, gloo: Gloo, *, quick: bool) -> dict[str, object]:
    """Return the times of one row: of each call the slowest rank's, in seconds."""
    try:
        sides = row.prepare(comm, gloo)
    except (AllReducedError, ImportError) as error:
        return {"error": str(error)}
    iterations = row.quick_iterations if quick else row.iterations
    ours = np.zeros(iterations)
    theirs = np.zeros(iterations)
    for iteration in range(-3, iterations):
        mine, result = timed(sides.fill_ours, comm.barrier, sides.ours)
        if sides.result(result) != comm.size:
            raise SystemExit(f"row {row.key}: the sum of ones over {comm.size} ranks is {sides.result(result)}")
        del result
        other, _ = timed(sides.fill_gloo, gloo.barrier, sides.gloo)
        if iteration >= 0:
            ours[iteration], theirs[iteration] = mine, other
    return {
        "ours": comm.all_reduce(ours, op="max").tolist(),
        "gloo": comm.all_reduce(theirs, op="max").tolist(),
    }


def timed(fill: Callable[[], None], barrier: Callable[[], None], call: Callable[[], object]) -> tuple[float, object]:
    """Return how long the call took, and what it returned."""
    fill()
    barrier()
    begin = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - begin
    barrier()  # where cores are few, the next inputs must not be written while other ranks still wait for a core
    return seconds, result


def agent_memory() -> int:
    """Return KiB that this node's agent has beside shared arenas: its own pages and its scratch."""
    pid = agent_pid()
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Rss")
    )
    return sum(int(fields[key].split()[0]) for key in ("RssAnon", "RssFile"))


if __name__ == "__main__":
    main()
