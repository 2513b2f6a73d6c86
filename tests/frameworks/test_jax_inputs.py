"""JAX arrays on the CPU as inputs, over a real agent with two ranks; results are NumPy arrays."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest
from tests.integration.agents import StartAgent
from tests.support.pair import both, pair

from allreduced.client import AsyncCommunicator, InvalidArgument
from allreduced.core.dtypes import DType

if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX is not installed; `make test-frameworks` installs it", allow_module_level=True)

jax: Any = importlib.import_module("jax")
jnp: Any = importlib.import_module("jax.numpy")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)
jnp.zeros(1).block_until_ready()  # what JAX opens for itself is open before the first test

NUMBERS = [dtype.label for dtype in DType if dtype is not DType.BOOL]
LARGE = 5000
"""Elements of an array that does not travel in messages."""


async def twice(ranks: tuple[AsyncCommunicator, AsyncCommunicator], x: Any) -> list[Any]:
    return await both(ranks, *[lambda rank: rank.all_reduce(x)] * 2)


async def test_every_dtype(start_agent: StartAgent) -> None:
    async with pair(start_agent("a").socket) as ranks:
        for dtype in NUMBERS:
            for rows in (3, LARGE):
                values = (np.arange(rows * 4) % 50).reshape(rows, 4).astype(dtype)
                x = jnp.asarray(values)
                for result in await twice(ranks, x):
                    assert type(result) is np.ndarray
                    assert result.dtype == x.dtype == dtype
                    np.testing.assert_array_equal(result, values + values)
                    assert jnp.asarray(result).dtype == x.dtype  # and back, without a change


async def test_shapes_lists_and_values_that_are_still_computed(start_agent: StartAgent) -> None:
    async with pair(start_agent("a").socket) as ranks:
        for x, expected in (
            (jnp.array(2.5, jnp.bfloat16), 5.0),
            (jnp.zeros((0, 3)), []),
            (jnp.array([True, False]), [True, False]),
        ):
            for result in await twice(ranks, x):
                assert isinstance(result, np.ndarray)
                assert (result.dtype, result.shape, result.tolist()) == (x.dtype, x.shape, expected)

        work = jnp.eye(400)
        for _ in range(20):  # JAX returns before it has computed
            work = work @ work
        for result in await twice(ranks, work):
            np.testing.assert_array_equal(np.asarray(result), 2 * np.eye(400))

        tensors = [jnp.full((2, 2), 1.5, "float32"), jnp.full(3, 2, "bfloat16"), jnp.array(7)]
        for results in await both(ranks, *[lambda r: r.all_reduce_many(tensors, op="sum")] * 2):
            assert isinstance(results, list)
            assert [result.tolist() for result in results] == [[[3.0, 3.0]] * 2, [4.0] * 3, 14]

        gradients = jax.grad(lambda w: (w**2).sum())(jnp.arange(3.0))
        for result in await both(ranks, *[lambda r: r.all_reduce(gradients, op="mean")] * 2):
            assert isinstance(result, np.ndarray)
            assert result.tolist() == [0, 2, 4]


async def test_arrays_that_are_refused_say_what_to_do(start_agent: StartAgent) -> None:
    async with pair(start_agent("a").socket) as ranks:
        rank = ranks[0]
        x = jnp.ones(3)
        with pytest.raises(InvalidArgument, match="out is read-only"):  # arrays of JAX never change
            await rank.all_reduce(np.ones(3), out=x)
        assert x.tolist() == [1, 1, 1]
        for given, text in (
            (jnp.ones(3, "float8_e5m2"), "x: dtype 'float8_e5m2' is not supported"),
            (jnp.ones(3, "int4"), "x cannot be read through DLPack: .*S4"),
            (jax.random.key(0), "x is a PRNGKeyArray, which is no tensor"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                await rank.all_reduce(given)
        with pytest.raises(InvalidArgument, match="Tracer"):
            jax.jit(lambda y: rank.all_reduce(y))(x)
