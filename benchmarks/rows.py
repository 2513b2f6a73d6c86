"""What is compared: each row is one collective call, made by ours and by Gloo on the same ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from allreduced.client import Communicator

Array: TypeAlias = "npt.NDArray[Any]"

MIB = 1 << 20


class Gloo:
    """The part of torch.distributed that is used; torch is not installed where only this package is developed."""

    def __init__(self) -> None:
        self.torch = import_module("torch")
        self.dist = import_module("torch.distributed")
        self.dist.init_process_group("gloo")

    def barrier(self) -> None:
        self.dist.barrier()

    def close(self) -> None:
        self.dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Sides:
    """One row on one rank.

    ``fill_ours`` and ``fill_gloo`` write the inputs anew before each call; ``ours`` and ``gloo`` are what is timed.
    """

    fill_ours: Callable[[], None]
    fill_gloo: Callable[[], None]
    ours: Callable[[], object]
    gloo: Callable[[], object]
    result: Callable[[object], float]
    """The first element of what ``ours`` returned, for a check."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A program of ``limits/`` and its arguments, without the iterations."""

    program: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """``against_gloo``: Gloo's time is at least so many times ours. ``within``: ours is at most so many limits."""

    key: str
    title: str
    nodes: int
    ranks_per_node: int
    prepare: Callable[[Communicator, Gloo], Sides]
    iterations: int
    quick_iterations: int
    against_gloo: float = 0.0
    within: float = 0.0
    limit: Limit | None = None
    against_row: str = ""
    """The row whose time is at least ``against_ours`` times this one's."""
    against_ours: float = 0.0


def views(dtype: str, count: int) -> Callable[[Communicator, Gloo], Sides]:
    """Return a row with inputs in shared memory and results as views."""

    def prepare(comm: Communicator, gloo: Gloo) -> Sides:
        if dtype == "bfloat16":
            import_module("ml_dtypes")  # teaches NumPy this type
        buffer: Array = comm.empty((count,), dtype)
        tensor = gloo.torch.ones(count, dtype=getattr(gloo.torch, dtype))
        return Sides(
            lambda: buffer.fill(1),
            lambda: tensor.fill_(1),
            lambda: comm.all_reduce(buffer, view=True),
            lambda: gloo.dist.all_reduce(tensor),
            _first,
        )

    return prepare


def private(count: int, *, in_place: bool) -> Callable[[Communicator, Gloo], Sides]:
    """Return a row with plain arrays: reduced in place as Gloo does, or into a new array for each call."""

    def prepare(comm: Communicator, gloo: Gloo) -> Sides:
        array: Array = np.ones(count, np.float32)
        tensor = gloo.torch.ones(count)
        return Sides(
            lambda: array.fill(1),
            lambda: tensor.fill_(1),
            lambda: comm.all_reduce(array, out=array if in_place else None),
            lambda: gloo.dist.all_reduce(tensor),
            _first,
        )

    return prepare


def many(shapes: Sequence[Sequence[int]]) -> Callable[[Communicator, Gloo], Sides]:
    """Return a row of one operation for each tensor, all in flight, in place, in the order in which gradients come."""

    def prepare(comm: Communicator, gloo: Gloo) -> Sides:
        arrays: list[Array] = [np.ones(shape, np.float32) for shape in reversed(shapes)]
        tensors = [gloo.torch.ones(tuple(shape)) for shape in reversed(shapes)]

        def fill_ours() -> None:
            for array in arrays:
                array.fill(1)

        def fill_gloo() -> None:
            for tensor in tensors:
                tensor.fill_(1)

        def ours() -> object:
            works = [
                comm.all_reduce(array, out=array, name=f"layer{index}", async_op=True)
                for index, array in enumerate(arrays)
            ]
            for work in works:
                work.wait()
            return arrays[-1]

        def by_gloo() -> object:
            works = [gloo.dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()
            return tensors[-1]

        return Sides(fill_ours, fill_gloo, ours, by_gloo, _first)

    return prepare


def _first(result: object) -> float:
    return float(np.asarray(result).reshape(-1)[0])


def resnet50() -> list[list[int]]:
    """Return the shapes of the parameters of ResNet-50."""
    shapes: list[list[int]] = json.loads(Path(__file__).with_name("resnet50.json").read_text())["shapes"]
    return shapes


_64 = 64 * MIB
_ELEMENTS = _64 // 4

ROWS = (
    Row(
        "views",
        "1 x 4, 64 MiB float32, views",
        1,
        4,
        views("float32", _ELEMENTS),
        21,
        9,
        against_gloo=6.0,
        within=1.6,
        limit=Limit("memory", ("4", str(_64))),
    ),
    Row("in_place", "1 x 4, 64 MiB float32, private, out=x", 1, 4, private(_ELEMENTS, in_place=True), 21, 9, 2.0),
    Row("private", "1 x 4, 64 MiB float32, private, new array", 1, 4, private(_ELEMENTS, in_place=False), 21, 9, 2.0),
    Row(
        "bf16",
        "1 x 4, 16 Mi bfloat16, views",
        1,
        4,
        views("bfloat16", _ELEMENTS),
        21,
        9,
        against_row="views",
        against_ours=1.6,
    ),
    Row(
        "small",
        "1 x 4, 4 KiB float32, private, new array",
        1,
        4,
        private(1024, in_place=False),
        2000,
        400,
        against_gloo=10.0,
        within=3.0,
        limit=Limit("server", ("4", "4096")),
    ),
    Row("1MiB", "1 x 4, 1 MiB float32, private, out=x", 1, 4, private(MIB // 4, in_place=True), 201, 51),
    Row("resnet50", "1 x 4, 161 tensors of ResNet-50, private, out=x", 1, 4, many(resnet50()), 15, 9, 3.0),
    Row(
        "2x1",
        "2 x 1, loopback TCP, 64 MiB float32, views",
        2,
        1,
        views("float32", _ELEMENTS),
        21,
        9,
        against_gloo=1.1,
        within=1.5,
        limit=Limit("exchange", (str(_64),)),
    ),
    Row("2x2", "2 x 2, loopback TCP, 64 MiB float32, views", 2, 2, views("float32", _ELEMENTS), 15, 9, 2.0),
)
