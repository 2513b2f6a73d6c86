"""The shortest use: every rank gives an array, every rank gets the sum.

Run it with any launcher; where no agent runs, a private one is started for the job:

    allreduced run --nodes 2 --ranks-per-node 2 -- python examples/all_reduce.py
    torchrun --nproc-per-node 4 examples/all_reduce.py
    mpirun -n 4 python examples/all_reduce.py
    python examples/all_reduce.py
"""

import numpy as np

from allreduced.client import connect

with connect() as comm:
    x = np.full(4, comm.rank + 1, dtype=np.float32)
    total = comm.all_reduce(x, op="sum")
    print(f"rank {comm.rank} of {comm.size} on {comm.nodes[comm.node]}: {total}")
