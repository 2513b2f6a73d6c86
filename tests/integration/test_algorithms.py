"""Every algorithm over real agents with unequal numbers of ranks gives the bits of the oracle, on every rank."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.integration.agents import StartAgent
from tests.simulation.kernels import same_bits
from tests.simulation.oracle import canonical_order, expected
from tests.unit.reduction_oracle import numpy_type

from allreduced.client import AsyncCommunicator
from allreduced.core.dtypes import DType
from allreduced.core.errors import InvalidArgument, MismatchError
from allreduced.core.reductions import Reduction
from allreduced.schedules.select import schedule_for

BOUND = 100.0
"""Seconds in which everything must have ended."""
COUNT = 300_011
"""Several tiles in each block, the last one short."""

LAYOUTS = [((0, 3), (1,), (2, 4, 5)), ((0,), (1, 2, 6), (3, 4), (5,))]
"""The ranks of each node, nodes by lowest rank."""

CASES = [
    ("float32", "mean"),
    ("bfloat16", "sum"),
    ("float16", "mean"),
    ("complex64", "prod"),
    ("int32", "sum"),
]


async def join(start_agent: StartAgent, layout: tuple[tuple[int, ...], ...]) -> list[AsyncCommunicator]:
    tile = {"ALLREDUCED_ENGINE_TILE_BYTES": "256KiB"}
    first = start_agent("node0", "--listen", "tcp://127.0.0.1:0", **tile)
    known = ("--join", first.listen.removeprefix("tcp://"))
    agents = [first]
    agents += [
        start_agent(f"node{index}", "--listen", "tcp://127.0.0.1:0", *known, **tile) for index in range(1, len(layout))
    ]
    size = sum(map(len, layout))
    places = {
        rank: (agent.socket, local, len(ranks))
        for agent, ranks in zip(agents, layout, strict=True)
        for local, rank in enumerate(ranks)
    }
    return await asyncio.gather(
        *(
            AsyncCommunicator.connect(
                job="algorithms",
                rank=rank,
                size=size,
                socket=places[rank][0],
                local_rank=places[rank][1],
                local_size=places[rank][2],
                deadline=60.0,
            )
            for rank in range(size)
        )
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{len(layout)} nodes")
async def test_every_algorithm_gives_the_bits_of_the_oracle(
    start_agent: StartAgent, layout: tuple[tuple[int, ...], ...]
) -> None:
    async with asyncio.timeout(BOUND):
        ranks = await join(start_agent, layout)
        for label, op in CASES:
            dtype, reduction = DType[label.upper()], Reduction[op.upper()]
            kind = numpy_type(dtype)
            generators = [np.random.default_rng(rank) for rank in range(len(ranks))]
            inputs = {rank: _values(generator, kind) for rank, generator in enumerate(generators)}
            for algorithm in ("direct", "ring", "canonical"):
                works = [comm.all_reduce(inputs[comm.rank], op=op, algorithm=algorithm) for comm in ranks]
                results = await asyncio.gather(*works)
                if algorithm == "canonical":
                    wanted = canonical_order(dtype, reduction, inputs, layout).tobytes()
                else:
                    schedule = schedule_for("all_reduce", algorithm, len(layout), -1)
                    wanted = expected(schedule, dtype, reduction, len(ranks), inputs, layout).tobytes()
                for result, work in zip(results, works, strict=True):
                    assert same_bits(dtype, result.tobytes(), wanted), (label, op, algorithm)
                    assert result.tobytes() == results[0].tobytes()
                    assert work.info is not None
                    assert work.info.algorithm == algorithm
        data = np.arange(COUNT, dtype="int32")
        for algorithm in ("direct", "chain"):
            for root in (0, len(ranks) - 1):
                copies = await asyncio.gather(
                    *(comm.broadcast(data * (comm.rank == root), root, algorithm=algorithm) for comm in ranks)
                )
                assert all(np.array_equal(copy, data) for copy in copies)
        await asyncio.gather(*(comm.close() for comm in ranks))


async def test_a_part_of_a_tensor_has_the_same_bits_alone(start_agent: StartAgent) -> None:
    async with asyncio.timeout(BOUND):
        ranks = await join(start_agent, LAYOUTS[0])
        for label in ("float32", "bfloat16"):
            generators = [np.random.default_rng(rank) for rank in range(len(ranks))]
            inputs = [_values(generator, numpy_type(DType[label.upper()])) for generator in generators]
            whole = await asyncio.gather(*(comm.all_reduce(inputs[comm.rank], deterministic=True) for comm in ranks))
            for span in (slice(0, 7), slice(1000, 70_001), slice(COUNT - 90_000, COUNT)):
                part = await asyncio.gather(
                    *(comm.all_reduce(inputs[comm.rank][span], deterministic=True) for comm in ranks)
                )
                assert part[0].tobytes() == whole[0][span].tobytes()
        await asyncio.gather(*(comm.close() for comm in ranks))


async def test_an_algorithm_that_is_unknown_or_differs_is_an_error_that_says_so(start_agent: StartAgent) -> None:
    x = np.ones(100, "float32")
    async with asyncio.timeout(BOUND):
        ranks = await join(start_agent, LAYOUTS[0])
        errors = await asyncio.gather(
            *(comm.all_reduce(x, algorithm="magic") for comm in ranks), return_exceptions=True
        )
        for error in errors:
            assert isinstance(error, InvalidArgument)
            assert "algorithm 'magic' is not supported for all_reduce; there are direct, ring, canonical" in str(error)
        errors = await asyncio.gather(
            *(comm.all_reduce(x, deterministic=comm.rank == 1) for comm in ranks), return_exceptions=True
        )
        for error in errors:
            assert isinstance(error, MismatchError)
            assert error.field == "algorithm"
            assert error.by_rank[1] == "canonical"
        await asyncio.gather(*(comm.close() for comm in ranks))


def _values(
    generator: np.random.Generator, kind: np.dtype[np.generic]
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    if kind.kind == "i":
        return generator.integers(-(1 << 31), 1 << 31, COUNT, "int64").astype(kind)
    if kind.kind == "c":
        return generator.standard_normal(2 * COUNT).view("complex128").astype(kind)
    return (generator.standard_normal(COUNT) * 10.0 ** generator.integers(-2, 3, COUNT)).astype(kind)
