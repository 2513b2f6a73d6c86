"""Compute while gradients are on their way: asynchronous calls, matched by name, without copies.

allreduced run --nodes 2 --ranks-per-node 2 -- python examples/overlap.py
"""

import numpy as np

from allreduced.client import connect

LAYERS = {"head": 10_000, "body": 1_000_000, "stem": 50_000}

with connect() as comm:
    # Gradients live in memory that is shared with the agent: submitting them copies nothing.
    gradients = {layer: comm.zeros(size, np.float32) for layer, size in LAYERS.items()}

    works = {}
    for step, (layer, gradient) in enumerate(gradients.items()):
        gradient += comm.rank  # "backward" of this layer
        # Last layers first; a name per layer makes the order of the calls free. The first to be needed is urgent.
        works[layer] = comm.all_reduce(gradient, op="mean", name=layer, priority=step, view=True, async_op=True)

    for layer, work in works.items():
        average = work.wait(timeout=60.0)  # a read-only view of the result that all ranks of this node share
        info = work.info
        if comm.rank == 0 and info is not None:
            print(f"{layer}: {average[0]} from ranks {info.participants} by {info.algorithm} in {info.elapsed:.4f} s")
