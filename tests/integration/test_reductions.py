"""The whole table of reductions over real agents, two ranks on each of two nodes."""

from __future__ import annotations

import asyncio

import numpy as np
from tests.integration.agents import StartAgent
from tests.unit.reduction_oracle import bits, expected, numpy_type

from allreduced.client import AsyncCommunicator
from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction, reductions_of

BOUND = 60.0
"""Seconds in which everything must have ended."""

RANKS = 4


async def test_every_dtype_and_reduction_over_two_nodes(start_agent: StartAgent) -> None:
    first = start_agent("a", "--listen", "tcp://127.0.0.1:0")
    second = start_agent("b", "--listen", "tcp://127.0.0.1:0", "--join", first.listen.removeprefix("tcp://"))
    async with asyncio.timeout(BOUND):
        ranks = await asyncio.gather(
            *(
                AsyncCommunicator.connect(
                    job="table", rank=rank, size=RANKS, local_rank=rank % 2, local_size=2, socket=agent.socket
                )
                for rank, agent in enumerate((first, first, second, second))
            )
        )
        for dtype in DType:
            # Small whole numbers, so that no order of theirs can be told from another.
            kind = numpy_type(dtype)
            inputs = [((np.arange(5003) + 3 * rank) % 4).astype(kind) for rank in range(RANKS)]
            for reduction in sorted(reductions_of(dtype) - {Reduction.COPY}):
                results = await asyncio.gather(
                    *(rank.all_reduce(x, op=reduction.label) for rank, x in zip(ranks, inputs, strict=True))
                )
                for result in results:
                    assert isinstance(result, np.ndarray)
                    assert result.dtype == kind
                    assert bits(result) == bits(expected(dtype, reduction, inputs, RANKS)), (dtype, reduction)
        for rank in ranks:
            await rank.close()
