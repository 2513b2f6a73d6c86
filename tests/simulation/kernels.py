"""Reductions by NumPy, in the order of the sources, one after the other: the fake of the native kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction


def numpy_dtype(dtype: int) -> np.dtype[np.generic]:
    """Return NumPy's name for an element type."""
    return np.dtype(DType(dtype).label)


def fold(reduction: Reduction, divisor: int, sources: Sequence[npt.NDArray[np.generic]]) -> npt.NDArray[np.generic]:
    """Combine the sources in order; a mean is divided once, at the end."""
    total = sources[0].copy()
    with np.errstate(all="ignore"):
        for source in sources[1:]:
            if reduction in (Reduction.SUM, Reduction.MEAN):
                total = np.add(total, source)
            elif reduction is Reduction.PROD:
                total = np.multiply(total, source)
            elif reduction is Reduction.MIN:
                total = np.minimum(total, source)
            elif reduction is Reduction.MAX:
                total = np.maximum(total, source)
            else:
                raise AssertionError("a copy has one source")
        if reduction is Reduction.MEAN:
            total = np.divide(total, total.dtype.type(divisor))
    return total
