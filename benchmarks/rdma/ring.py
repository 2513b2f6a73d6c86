"""An all-reduce over agents, one rank on each: what it takes, and whether it is right."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from tests.rdma.nursery import Copy

from allreduced.client import connect


def measure(start: Callable[[Sequence[str]], Copy], sockets: Sequence[str], nbytes: int, times: int) -> list[float]:
    """Return the seconds of each all-reduce of ``nbytes`` of float32: those of its slowest rank.

    ``start`` starts :func:`rank` with these words. ``sockets``: of the agents.
    """
    words = [str(nbytes), str(times), str(len(sockets))]
    ranks = [start([*words, str(rank), socket]) for rank, socket in enumerate(sockets)]
    try:
        answers = []
        for process in ranks:
            assert process.stdout is not None
            answers.append(process.stdout.read())
        if any(process.wait() for process in ranks):
            raise SystemExit("a rank failed")
    finally:
        for process in ranks:
            process.kill()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
    return [max(of_call) for of_call in zip(*(json.loads(answer) for answer in answers), strict=True)]


def rank(words: list[str]) -> int:
    """Be a rank: reduce from and into shared memory, as a training loop that cares for speed does; check each sum."""
    nbytes, times, size, number = map(int, words[:4])
    seconds = []
    with connect(
        job=f"ring-{os.getppid()}", rank=number, size=size, local_rank=0, local_size=1, socket=words[4]
    ) as comm:
        values = np.arange(nbytes // 4, dtype=np.float32) % 1000
        tensor = comm.empty(nbytes // 4, "float32")
        for call in range(times + 1):
            tensor[:] = values + np.float32(number + call)
            comm.barrier()
            began = time.perf_counter()
            result = comm.all_reduce(tensor, op="sum", view=True)
            seconds.append(time.perf_counter() - began)
            wanted = values * np.float32(size) + np.float32(size * (size - 1) // 2 + size * call)
            if not np.array_equal(result, wanted):
                raise SystemExit(f"rank {number}: a wrong sum in call {call}")
            del result
            comm.barrier()
    sys.stdout.write(json.dumps(seconds[1:]) + "\n")
    return 0
