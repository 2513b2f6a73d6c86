"""torch tensors as inputs, as ``out`` and as results, over a real agent with two ranks."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest
from tests.integration.agents import StartAgent
from tests.support.pair import both, pair

from allreduced.client import InvalidArgument
from allreduced.core.dtypes import DType

if importlib.util.find_spec("torch") is None:
    pytest.skip("PyTorch is not installed; `make test-frameworks` installs it", allow_module_level=True)

torch: Any = importlib.import_module("torch")

NUMBERS = [dtype.label for dtype in DType if dtype is not DType.BOOL]
LARGE = 5000
"""Elements of a tensor that does not travel in messages."""


def grid(rows: int, dtype: str) -> Any:
    """Return whole numbers that every dtype holds, and whose double it holds too."""
    return (torch.arange(rows * 4) % 50).reshape(rows, 4).to(getattr(torch, dtype))


async def test_every_dtype_in_every_layout(start_agent: StartAgent) -> None:
    async with pair(start_agent("a").socket) as ranks:
        for dtype in NUMBERS:
            for rows in (3, LARGE):
                x = grid(rows, dtype)
                expected = [[2 * value for value in row] for row in x[:7].tolist()]
                layouts = {
                    "contiguous": x,
                    "transposed": x.t().contiguous().t(),
                    "strided": x.repeat_interleave(2, dim=1)[:, ::2],
                    "offset": torch.cat([x[:1], x])[1:],
                }
                for layout, given in layouts.items():
                    assert given.is_contiguous() == (layout in ("contiguous", "offset"))
                    results = await both(ranks, *[lambda rank, y=given: rank.all_reduce(y)] * 2)
                    for result in results:
                        assert isinstance(result, torch.Tensor)
                        assert result.dtype is x.dtype
                        assert result.shape == x.shape
                        assert result[:7].tolist() == expected, (dtype, layout)
                        assert torch.equal(result.to(torch.complex128), 2 * x.to(torch.complex128))


async def test_shapes_flags_and_outs(start_agent: StartAgent) -> None:
    async with pair(start_agent("a").socket) as ranks:
        # no dimensions, no elements, broadcast, bool
        for x, expected in (
            (torch.tensor(2.5, dtype=torch.bfloat16), 5.0),
            (torch.zeros(0, 3), []),
            (torch.tensor([1.0, 2.0]).expand(2, 2), [[2.0, 4.0]] * 2),
            (torch.tensor([True, False]), [True, False]),
        ):
            for result in await both(ranks, *[lambda rank, y=x: rank.all_reduce(y)] * 2):
                assert isinstance(result, torch.Tensor)
                assert (result.dtype, result.shape, result.tolist()) == (x.dtype, x.shape, expected)

        # autograd does not see it: neither the input, nor what is written
        leaf = torch.ones(3, requires_grad=True)
        parameter = torch.nn.Parameter(torch.ones(2))
        for x in (leaf, leaf * 2, parameter):
            for result in await both(ranks, *[lambda rank, y=x: rank.all_reduce(y)] * 2):
                assert type(result) is torch.Tensor
                assert not result.requires_grad
                assert result.tolist() == [2 * value for value in x.tolist()]
        first, _ = await both(ranks, lambda r: r.all_reduce(leaf, out=leaf), lambda r: r.all_reduce(torch.ones(3)))
        assert first is leaf
        assert leaf.requires_grad
        assert leaf.tolist() == [2, 2, 2]

        # out: in place without gaps and with, another kind than x
        for dtype in (torch.float32, torch.bfloat16):
            base = torch.ones(LARGE, 3, dtype=dtype)
            column = base[:, 1]
            first, second = await asyncio.gather(
                ranks[0].all_reduce(column, out=column),
                ranks[1].all_reduce(torch.ones(LARGE, dtype=dtype)),
            )
            assert first is column
            assert base.sum(0).tolist() == torch.tensor([LARGE, 2 * LARGE, LARGE], dtype=dtype).tolist()
            assert isinstance(second, torch.Tensor)
            assert (second == 2).all()
        out = torch.zeros(4, dtype=torch.int32)
        array = np.zeros(4, np.int32)
        first, second = await both(
            ranks,
            lambda r: r.all_reduce(np.arange(4, dtype=np.int32), out=out),
            lambda r: r.all_reduce(torch.arange(4, dtype=torch.int32), out=array),
        )
        assert first is out
        assert second is array
        assert out.tolist() == array.tolist() == [0, 2, 4, 6]

        # a list with gradients of a model
        tensors = [torch.full((2, 2), 1.5), torch.full((3,), 2.0, dtype=torch.bfloat16), torch.tensor(7)]
        for results in await both(ranks, *[lambda r: r.all_reduce_many(tensors)] * 2):
            assert isinstance(results, list)
            assert [result.tolist() for result in results] == [[[3.0, 3.0]] * 2, [4.0] * 3, 14]
            assert [result.dtype for result in results] == [tensor.dtype for tensor in tensors]


async def test_tensors_that_are_refused_say_what_to_do(start_agent: StartAgent) -> None:
    async with pair(start_agent("a").socket) as ranks:
        rank = ranks[0]
        freed = torch.ones(3)
        freed.untyped_storage().resize_(0)  # as FSDP does
        for x, text in (
            (freed, "its storage was freed"),
            (torch.nn.UninitializedParameter(), "x cannot be read as an array: .*uninitialized"),
            (torch.empty(3, device="meta"), r"x is on device 'meta' .*x.cpu\(\)"),
            (torch.ones(3).to_sparse(), r"x cannot be read as an array: .*to_dense"),
            (torch.ones(3, dtype=torch.complex64).conj(), r"conjugate bit .*resolve_conj\(\)"),
            (torch.ones(3).to(torch.float8_e5m2), "x: dtype 'float8_e5m2' is not supported; there are float32"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                await rank.all_reduce(x)
        for out, text in (
            (torch.zeros(1).expand(3), "out has elements that share memory"),
            (torch.zeros(3, dtype=torch.float64), "out has dtype float64, the result has float32"),
            (torch.zeros(1, 3), r"out has shape \(1, 3\), the result has \(3,\)"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                await rank.all_reduce(torch.ones(3), out=out)
        with pytest.raises(InvalidArgument, match=r"torch has no read-only tensors .*x.numpy\(\)"):
            await rank.all_reduce(torch.ones(3), view=True)
