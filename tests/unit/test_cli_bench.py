from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16
import numpy as np
import pytest

from allreduced.cli import bench
from allreduced.cli.measure import Array, Measurement, Sweep, bus_factor, input_of, measure, result_of
from allreduced.cli.table import Column, Table
from allreduced.client import Communicator
from allreduced.core.dtypes import DType
from allreduced.core.errors import ConfigError, LimitExceeded
from allreduced.core.reductions import Reduction, reductions_of

SWEEP = Sweep(
    collective="all_reduce",
    dtype="float32",
    op="sum",
    begin=8,
    end=64,
    factor=2,
    warmup=1,
    iterations=2,
    view=False,
    check=True,
)


class Alone:
    """A communicator of one rank; ``spoil`` elements of each result are wrong."""

    def __init__(self, spoil: int = 0) -> None:
        self.rank, self.size = 0, 1
        self.calls = 0
        self._spoil = spoil

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return np.empty(shape, dtype)

    def barrier(self) -> None:
        pass

    def all_reduce(self, x: Array, *, op: str, view: bool = False, algorithm: str = "") -> Array:
        self.calls += x.dtype == np.float32
        result = np.array(x)
        if x.dtype == np.float32:
            result[: self._spoil] = np.float32(-1)
        return result


def run(comm: Alone, sweep: Sweep) -> list[tuple[int, int, int | None]]:
    return [(row.nbytes, row.count, row.wrong) for row in measure(cast(Communicator, comm), sweep)]


def test_sizes_double_and_every_result_is_checked() -> None:
    comm = Alone()
    assert run(comm, SWEEP) == [(8, 2, 0), (16, 4, 0), (32, 8, 0), (64, 16, 0)]
    assert comm.calls == 4 * (1 + 2 + 1)


def test_wrong_elements_are_counted() -> None:
    assert run(Alone(spoil=3), SWEEP) == [(8, 2, 2), (16, 4, 3), (32, 8, 3), (64, 16, 3)]
    assert run(Alone(spoil=3), replace(SWEEP, check=False))[0] == (8, 2, None)


def test_sizes_below_an_element_are_measured_once() -> None:
    assert list(replace(SWEEP, begin=0, end=8).counts()) == [0, 1, 2]
    assert list(replace(SWEEP, begin=8, end=8).counts()) == [2]


def test_busbw_is_defined_as_in_nccl_tests() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_reduce", 1) == 0.0
    assert bus_factor("broadcast", 4) == 1.0


DEFINED = [
    (reduction.label, dtype.label) for dtype in DType for reduction in sorted(reductions_of(dtype) - {Reduction.COPY})
]
FUNCTIONS: dict[str, Callable[..., Array]] = {
    "sum": np.sum,
    "mean": lambda x, axis: np.mean(x.real, axis) + np.mean(x.imag, axis) * (1j if np.iscomplexobj(x) else 0),
    "prod": np.prod,
    "min": np.min,
    "max": np.max,
    "band": np.bitwise_and.reduce,
    "bor": np.bitwise_or.reduce,
    "bxor": np.bitwise_xor.reduce,
    "land": np.all,
    "lor": np.any,
    "lxor": np.logical_xor.reduce,
}


@pytest.mark.parametrize(("op", "dtype"), DEFINED)
def test_expected_results_are_those_of_numpy(op: str, dtype: str) -> None:
    sweep = replace(SWEEP, op=op, dtype=dtype)
    inputs = np.stack([input_of(rank, 5, 100, sweep) for rank in range(5)])
    wide = inputs.astype("float32") if dtype in ("float16", "bfloat16") else inputs
    expected = FUNCTIONS[op](wide, axis=0).astype(dtype)
    found = result_of(5, 100, sweep)
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found, expected)


def test_pairs_outside_the_table_are_refused() -> None:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    with pytest.raises(ConfigError, match="mean of int8 is not defined"):
        bench.sweep_of(parser.parse_args(["bench", "--op", "mean", "--dtype", "int8"]))
    assert bench.sweep_of(parser.parse_args(["bench", "--op", "lxor", "--dtype", "bfloat16"])).dtype == "bfloat16"


def test_sizes_that_no_tensor_has_are_refused() -> None:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    size = str(1 << 63)
    with pytest.raises(ConfigError, match=f"{size} bytes, is more than any tensor has"):
        bench.sweep_of(parser.parse_args(["bench", "-b", size, "-e", size]))


def test_a_size_for_which_there_is_no_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(_comm: Communicator, _sweep: Sweep) -> Iterator[Measurement]:
        raise MemoryError("Unable to allocate 1. TiB")

    monkeypatch.setattr("allreduced.cli.measure.measure", measured)
    with pytest.raises(LimitExceeded, match=r"rank 0 has no memory for it: Unable to allocate 1. TiB .lower --end"):
        list(bench._measured(cast(Communicator, Alone()), SWEEP))


def test_a_broadcast_gives_everybody_the_input_of_rank_0() -> None:
    sweep = replace(SWEEP, collective="broadcast")
    np.testing.assert_array_equal(result_of(4, 50, sweep), input_of(0, 4, 50, sweep))


def test_columns_are_aligned_under_their_headings() -> None:
    table = Table([Column("size", "(B)", 8), Column("time", "(us)", 8)])
    assert table.heading() == "#   size    time\n#    (B)    (us)"
    assert table.row(["64", "1.5"]) == "      64     1.5"
