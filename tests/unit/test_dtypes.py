from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from allreduced.core.dtypes import DType, parse_dtype
from allreduced.core.errors import InvalidArgument
from allreduced.core.reductions import Reduction, parse_reduction, reductions_of

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")

ALL = frozenset({"sum", "mean", "prod", "min", "max", "band", "bor", "bxor", "land", "lor", "lxor"})
DEFINED = {
    **dict.fromkeys(INTEGERS, ALL - {"mean"}),
    **dict.fromkeys(FLOATS, ALL - {"band", "bor", "bxor"}),
    **dict.fromkeys(COMPLEX, frozenset({"sum", "mean", "prod"})),
    "bool": ALL - {"mean"},
}


def test_the_table_of_dtypes() -> None:
    assert {dtype.label for dtype in DType} == set(DEFINED)


@pytest.mark.parametrize("dtype", DType)
def test_labels_sizes_and_kinds_are_numpys(dtype: DType) -> None:
    assert parse_dtype(dtype.label) is dtype
    kind = np.dtype(ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else dtype.label)
    assert kind.itemsize == dtype.itemsize == np.dtype(dtype.storage).itemsize
    assert kind.name == dtype.label
    assert dtype.is_integer is np.issubdtype(kind, np.integer)
    assert dtype.is_float is (np.issubdtype(kind, np.floating) or dtype is DType.BFLOAT16)
    assert dtype.is_complex is np.issubdtype(kind, np.complexfloating)


def test_storage_is_the_label_wherever_numpy_knows_it() -> None:
    assert {dtype.label: dtype.storage for dtype in DType if dtype.storage != dtype.label} == {"bfloat16": "uint16"}


def test_partial_results_of_16_bit_floats_are_held_in_float32() -> None:
    wider = {dtype.label: dtype.accumulator.label for dtype in DType if dtype.accumulator is not dtype}
    assert wider == {"float16": "float32", "bfloat16": "float32"}


def test_codes_of_dtypes_never_change() -> None:
    labels = (
        "float32 float64 int32 int64 int8 int16 uint8 uint16 uint32 uint64 bool float16 bfloat16 complex64 complex128"
    )
    first = {label: code for code, label in enumerate(labels.split(), 1)}
    assert {dtype.label: int(dtype) for dtype in DType if dtype.label in first} == first


def test_codes_of_reductions_never_change() -> None:
    labels = "copy sum mean prod min max band bor bxor land lor lxor"
    first = {label: code for code, label in enumerate(labels.split())}
    assert {reduction.label: int(reduction) for reduction in Reduction if reduction.label in first} == first


def test_an_unknown_dtype_is_refused_with_the_table() -> None:
    with pytest.raises(InvalidArgument, match="dtype 'float8' is not supported") as caught:
        parse_dtype("float8")
    assert all(dtype.label in caught.value.message for dtype in DType)
    assert "astype" in caught.value.hint


@pytest.mark.parametrize("label", ["copy", "average", "SUM", ""])
def test_an_unknown_reduction_is_refused_with_the_table(label: str) -> None:
    with pytest.raises(
        InvalidArgument, match="is not supported; there are sum, mean, prod, min, max, band, bor"
    ) as caught:
        parse_reduction(label, DType.FLOAT32)
    assert all(reduction in caught.value.message for reduction in ALL)


@pytest.mark.parametrize("dtype", DType)
def test_reductions_of_every_dtype(dtype: DType) -> None:
    defined = DEFINED[dtype.label]
    assert {reduction.label for reduction in reductions_of(dtype)} == defined | {"copy"}
    for label in ALL:
        if label in defined:
            assert parse_reduction(label, dtype).label == label
            continue
        with pytest.raises(InvalidArgument, match=f"^{label} of {dtype.label} is not defined") as caught:
            parse_reduction(label, dtype)
        listed = caught.value.message.partition("there are ")[2]
        assert set(listed.split(", ")) == defined
        assert caught.value.hint


def test_the_mean_of_integers_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        InvalidArgument, match="mean of int32 is not defined: the result would not be an integer"
    ) as caught:
        parse_reduction("mean", DType.INT32)
    assert caught.value.hint == "use op='sum' and divide, or convert to float64 first"


def test_the_table_of_the_documentation_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
    head, _, *rows = (line.strip("|").split("|") for line in page.splitlines() if line.startswith("|"))
    columns = [set(re.findall("`([a-z]+)`", cell)) for cell in head[1:]]
    documented = {
        label.strip(): set().union(*(labels for labels, cell in zip(columns, cells, strict=True) if cell.strip()))
        for first, *cells in rows
        for label in first.split(",")
    }
    assert documented == DEFINED
