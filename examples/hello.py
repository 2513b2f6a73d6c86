"""The smallest program.

Run it with a launcher, or alone:

    allreduced run --ranks-per-node 4 -- python examples/hello.py
    torchrun --nproc-per-node 4 examples/hello.py
    python examples/hello.py
"""

import numpy as np

from allreduced.client import connect

with connect() as comm:
    x = np.full(5, comm.rank + 1, dtype="float32")
    total = comm.all_reduce(x, op="sum")
    print(f"rank {comm.rank} of {comm.size}: {total}")
