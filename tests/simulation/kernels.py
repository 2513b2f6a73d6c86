"""Reductions by NumPy, in the order of the sources, one after the other: the fake of the native kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tests.unit.reduction_oracle import bits, expected, numpy_type

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction


def numpy_dtype(dtype: int) -> np.dtype[np.generic]:
    """Return NumPy's (or ml_dtypes') name for an element type."""
    return numpy_type(DType(dtype))


def fold(
    dtype: DType,
    reduction: Reduction,
    divisor: int,
    sources: Sequence[npt.NDArray[np.generic]],
    *,
    wide: bool = False,
) -> npt.NDArray[np.generic]:
    """Combine the sources in order; a mean is divided once, at the end.

    Sources are of ``dtype`` or its accumulator; the result is of ``dtype``, or (``wide``) its accumulator.
    """
    if reduction is Reduction.COPY:
        (only,) = sources
        return only.copy()
    return expected(dtype, reduction, sources, divisor, wide=wide)


def same_bits(dtype: int, one: bytes, other: bytes) -> bool:
    """Return whether two results are equal, bit by bit but for the payload of NaNs."""
    kind = numpy_dtype(dtype)
    return one == other or bits(np.frombuffer(one, kind)) == bits(np.frombuffer(other, kind))
