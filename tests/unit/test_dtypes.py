from __future__ import annotations

import numpy as np
import pytest

from allreduced.core.dtypes import DType, parse_dtype
from allreduced.core.errors import InvalidArgument
from allreduced.core.reductions import Reduction, parse_reduction


@pytest.mark.parametrize("dtype", DType)
def test_labels_and_sizes_are_numpys(dtype: DType) -> None:
    assert parse_dtype(dtype.label) is dtype
    assert np.dtype(dtype.label).itemsize == dtype.itemsize
    assert dtype.is_integer is np.issubdtype(np.dtype(dtype.label), np.integer)


def test_codes_of_dtypes_never_change() -> None:
    first = {"float32": 1, "float64": 2, "int32": 3, "int64": 4}
    assert {dtype.label: int(dtype) for dtype in DType if dtype.label in first} == first


def test_codes_of_reductions_never_change() -> None:
    first = {"copy": 0, "sum": 1, "mean": 2, "prod": 3, "min": 4, "max": 5}
    assert {reduction.label: int(reduction) for reduction in Reduction if reduction.label in first} == first


def test_an_unknown_dtype_is_refused_with_the_table() -> None:
    with pytest.raises(InvalidArgument, match="dtype 'float8' is not supported") as caught:
        parse_dtype("float8")
    assert all(dtype.label in caught.value.message for dtype in DType)
    assert "astype" in caught.value.hint


@pytest.mark.parametrize("label", ["copy", "average", "SUM", ""])
def test_an_unknown_reduction_is_refused_with_the_table(label: str) -> None:
    with pytest.raises(InvalidArgument, match="is not supported; there are sum, mean, prod, min, max"):
        parse_reduction(label, DType.FLOAT32)


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("label", ["sum", "prod", "min", "max"])
def test_reductions_of_every_dtype(label: str, dtype: DType) -> None:
    assert parse_reduction(label, dtype).label == label


def test_mean_is_for_floats_only() -> None:
    assert parse_reduction("mean", DType.FLOAT64) is Reduction.MEAN
    for dtype in (DType.INT32, DType.INT64):
        with pytest.raises(InvalidArgument, match=f"mean of {dtype.label} is not defined"):
            parse_reduction("mean", dtype)
