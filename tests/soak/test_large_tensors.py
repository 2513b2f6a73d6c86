"""Tensors beyond 4 GiB, for real."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from tests.integration.agents import StartAgent

GIB = 1 << 30
RANK = """
import sys
import numpy as np
from allreduced.client import connect

socket, rank, dtype, nbytes = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
with connect(job="large", rank=rank, size=2, local_rank=0, local_size=1, socket=socket, deadline=600.0) as comm:
    x = comm.zeros(nbytes // np.dtype(dtype).itemsize, dtype)
    border = (1 << 32) // x.itemsize
    places = [0, 1, x.size // 2 - 1, x.size // 2, border - 1, border, border + 1, x.size - 2, x.size - 1]
    for index, place in enumerate(places):
        x[place] = 10 * (rank + 1) + index
    y = comm.all_reduce(x, op="sum", view=True)
    assert y.nbytes == nbytes
    assert [int(y[place]) for place in places] == [30 + 2 * index for index in range(len(places))]
    assert int(np.count_nonzero(y)) == len(set(places))
    print("done", flush=True)
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize(
    ("agents", "nbytes", "needed"),
    [
        pytest.param(1, 5 * GIB, 15.5 * GIB, id="one agent"),
        pytest.param(2, 4 * GIB + (64 << 20), 19.5 * GIB, id="two agents"),
    ],
)
def test_every_byte_beyond_4_gib_is_reduced(
    start_agent: StartAgent, agents: int, nbytes: int, needed: float, dtype: str
) -> None:
    available = psutil.virtual_memory().available
    if available < needed:
        pytest.skip(f"needs {needed / GIB:.1f} GiB of memory, {available / GIB:.1f} are available")
    limit = f"{20 if agents == 1 else 12}GiB"
    started = [start_agent("a", "--listen", "tcp://127.0.0.1:0", ALLREDUCED_LIMITS_ARENA_BYTES=limit)]
    join = started[0].listen.removeprefix("tcp://")
    if agents == 2:
        arguments = ("--listen", "tcp://127.0.0.1:0", "--join", join)
        started.append(start_agent("b", *arguments, ALLREDUCED_LIMITS_ARENA_BYTES=limit))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, started[rank % agents].socket, str(rank), dtype, str(nbytes)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert outputs == ["done\n"] * 2
    assert [agent.stop() for agent in started] == [0] * agents
