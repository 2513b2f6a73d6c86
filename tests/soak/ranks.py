"""What the ranks of the soak run do: `python ranks.py SOCKET RANK SIZE OPERATIONS`.

Each rank calls operations without names, with names that come again, and with names that never do, a window of them
at a time and in an order of its own, and checks every result. Prints ``mark OPERATIONS RSS DESCRIPTORS`` at times.
"""

from __future__ import annotations

import random
import sys

import numpy as np
import numpy.typing as npt
import psutil

from allreduced.client import connect

WINDOW = 40
MARKS = 40
NAMES = 300


def inputs(number: int, rank: int, base: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return what a rank gives to the ``number``-th operation."""
    count = 30_000 if number % 200 == 0 else number % 500
    return base[:count] * (rank + 1) + number


def name_of(number: int) -> str:
    """Return the name of the ``number``-th operation; empty for a third of them."""
    kind = number % 3
    return f"unique.{number}" if kind == 0 else f"again.{number // 3 % NAMES}" if kind == 1 else ""


def main() -> None:
    socket, rank, size, operations = sys.argv[1], *map(int, sys.argv[2:5])
    rng, process = random.Random(rank), psutil.Process()
    base = np.arange(30_000, dtype="int64")
    ranks = size * (size + 1) // 2
    every = max(WINDOW, operations // MARKS // WINDOW * WINDOW)
    with connect(job="soak", rank=rank, size=size, local_rank=0, local_size=1, socket=socket) as comm:
        for start in range(0, operations, WINDOW):
            window = list(range(start, min(start + WINDOW, operations)))
            named = [number for number in window if name_of(number)]
            rng.shuffle(named)
            order = [number if not name_of(number) else named.pop() for number in window]
            works = {
                number: comm.all_reduce(inputs(number, rank, base), op="sum", name=name_of(number), async_op=True)
                for number in order
            }
            for number, work in works.items():
                result = work.wait()
                count = len(result)
                assert np.array_equal(result, base[:count] * ranks + size * number), number
            if start % every == 0:
                print("mark", start, process.memory_info().rss, process.num_fds(), flush=True)
        print("mark", operations, process.memory_info().rss, process.num_fds(), flush=True)


if __name__ == "__main__":
    main()
