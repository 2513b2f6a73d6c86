"""Every kind of input through real agents, two ranks on each of two nodes."""

from __future__ import annotations

import asyncio

import numpy as np
from tests.integration.agents import StartAgent
from tests.support.inputs import INPUTS, Array

from allreduced.client import AsyncCommunicator

BOUND = 60.0
"""Seconds in which everything must have ended."""

RANKS = 4


async def test_all_inputs_over_two_nodes(start_agent: StartAgent) -> None:
    first = start_agent("a", "--listen", "tcp://127.0.0.1:0")
    second = start_agent("b", "--listen", "tcp://127.0.0.1:0", "--join", first.listen.removeprefix("tcp://"))
    async with asyncio.timeout(BOUND):
        ranks = await asyncio.gather(
            *(
                AsyncCommunicator.connect(
                    job="inputs", rank=rank, size=RANKS, local_rank=rank % 2, local_size=2, socket=agent.socket
                )
                for rank, agent in enumerate((first, first, second, second))
            )
        )
        expected = {
            name: values if values.dtype == bool else np.multiply(values, values.dtype.type(RANKS))
            for name, (_, values) in INPUTS.items()
        }
        for name, (make, values) in INPUTS.items():
            results = await asyncio.gather(*(rank.all_reduce(make(), name=name) for rank in ranks))
            for result in results:
                assert (type(result), result.dtype, result.shape) == (np.ndarray, values.dtype, values.shape), name
                np.testing.assert_array_equal(result, expected[name], name)

        # All of them as one call, the results written to arrays with gaps.
        outs = [[np.zeros((*sum_.shape, 2), sum_.dtype)[..., 0] for sum_ in expected.values()] for _ in ranks]
        inputs: list[list[Array]] = [[make() for make, _ in INPUTS.values()] for _ in ranks]  # type: ignore[misc]
        await asyncio.gather(
            *(rank.all_reduce_many(xs, out=out) for rank, xs, out in zip(ranks, inputs, outs, strict=True))
        )
        for out in outs:
            for result, (name, sum_) in zip(out, expected.items(), strict=True):
                np.testing.assert_array_equal(result, sum_, name)
        for rank in ranks:
            await rank.close()
