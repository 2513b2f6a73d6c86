"""The same with asyncio: every call starts at once and is awaited where its result is needed.

allreduced run --nodes 2 --ranks-per-node 2 -- python examples/asynchronous.py
"""

import asyncio

import numpy as np

from allreduced.client import AsyncCommunicator


async def main() -> None:
    """Average a few arrays at the same time."""
    async with AsyncCommunicator.connect() as comm:
        arrays = [np.full(100_000, comm.rank + index, np.float64) for index in range(3)]
        averages = await asyncio.gather(*(comm.all_reduce(array, op="mean") for array in arrays))
        await comm.barrier()
        if comm.rank == 0:
            print([float(average[0]) for average in averages])


asyncio.run(main())
