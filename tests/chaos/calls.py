"""What the ranks of a chaos job call, and what must come out: closed forms, so that every element can be checked."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from allreduced.client import Work
from allreduced.client.communicator import Communicator

KIB, MIB = 1 << 10, 1 << 20

SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
"""Bytes of the tensors of a mixed job."""

Result: TypeAlias = "npt.NDArray[np.generic] | list[npt.NDArray[np.generic]] | None"
Arrays: TypeAlias = "list[npt.NDArray[np.generic]]"


@dataclass(frozen=True)
class Call:
    """One collective of a step. ``index`` makes its values differ from those of the other calls of all steps."""

    name: str
    index: int
    start: Callable[[Communicator], Work[Result]]
    expected: Arrays

    def fault(self, result: Result) -> str:
        """Return what is wrong with a result; empty if every element is right."""
        got = [] if result is None else result if isinstance(result, list) else [result]
        if len(got) != len(self.expected):
            return f"{len(got)} tensors instead of {len(self.expected)}"
        for place, (array, wanted) in enumerate(zip(got, self.expected, strict=True)):
            if array.dtype != wanted.dtype or array.shape != wanted.shape:
                return f"tensor {place} is {array.dtype}{array.shape}, not {wanted.dtype}{wanted.shape}"
            if not np.array_equal(array, wanted):
                at = int(np.flatnonzero(array != wanted)[0])
                return f"tensor {place} has {array[at]} at {at}, not {wanted[at]}"
        return ""


@functools.lru_cache(maxsize=16)
def pattern(count: int) -> npt.NDArray[np.int64]:
    """Return whole numbers that stay exact in every type that is used, also when all ranks' are added up."""
    return np.arange(count, dtype=np.int64) % 1021


def line(count: int, dtype: str, factor: int, shift: int) -> npt.NDArray[np.generic]:
    """Return ``factor`` times the pattern plus ``shift``."""
    values: npt.NDArray[np.generic] = (pattern(count) * factor + shift).astype(dtype)
    return values


def step_calls(step: int, rank: int, size: int, sizes: Sequence[int]) -> list[Call]:
    """Return the calls of one step, in an order that is this rank's own."""
    large = sizes[step % len(sizes)]
    calls = [
        _sum("small", 5 * step, sizes[0] // 8, "int64", rank, size),
        _sum("large", 5 * step + 1, large // 4, "float32", rank, size),
        _many("many", 5 * step + 2, min(large, 64 * KIB) // 8, rank, size),
        _broadcast("weights", 5 * step + 3, min(large, MIB) // 4, (step + 1) % size, rank),
        Call("barrier", 5 * step + 4, lambda comm: comm.barrier(name="barrier", async_op=True), []),
    ]
    random.Random(step * size + rank).shuffle(calls)
    return calls


def large_calls(step: int, rank: int, size: int, sizes: Sequence[int]) -> list[Call]:
    """Return sums only, one for each of ``sizes``, the same in every step: no time goes by but in the calls."""
    del step
    return _large_calls(rank, size, tuple(sizes))


@functools.lru_cache
def _large_calls(rank: int, size: int, sizes: tuple[int, ...]) -> list[Call]:
    return [_sum(f"sum{place}", place, nbytes // 4, "float32", rank, size) for place, nbytes in enumerate(sizes)]


def _sum(name: str, index: int, count: int, dtype: str, rank: int, size: int) -> Call:
    shift = index % 4093
    x = line(count, dtype, rank + 1, shift)
    wanted = line(count, dtype, size * (size + 1) // 2, shift * size)
    return Call(name, index, lambda comm: comm.all_reduce(x, op="sum", name=name, async_op=True), [wanted])


def _many(name: str, index: int, count: int, rank: int, size: int) -> Call:
    shift = index % 4093

    def tensors(factor: int, add: int, least: int) -> Arrays:
        return [
            line(count, "float32", 1, shift + add),
            line(count // 2, "int32", factor, shift),
            line(3, "float32", 1, -least),
        ]

    x, wanted = tensors(rank + 1, rank, rank), tensors(size, size - 1, 0)
    return Call(name, index, lambda comm: comm.all_reduce_many(x, op="max", name=name, async_op=True), wanted)


def _broadcast(name: str, index: int, count: int, root: int, rank: int) -> Call:
    wanted = line(count, "int32", 1, index)
    x = wanted if rank == root else np.zeros_like(wanted)
    return Call(name, index, lambda comm: comm.broadcast(x, root, name=name, async_op=True), [wanted])
