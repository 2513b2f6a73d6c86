"""What the reductions must compute, by NumPy and ml_dtypes, and values to try them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction, reductions_of
from allreduced.daemon.kernels import reduce

Array: TypeAlias = "npt.NDArray[np.generic]"

PAIRS = [(dtype, reduction) for dtype in DType for reduction in Reduction if reduction in reductions_of(dtype)]
NARROW = (DType.FLOAT16, DType.BFLOAT16)
FLOATS = [dtype for dtype in DType if dtype.is_float]
INTEGERS = [dtype for dtype in DType if dtype.is_integer]
COMPLEX = [dtype for dtype in DType if dtype.is_complex]


def numpy_type(dtype: DType) -> np.dtype[np.generic]:
    return np.dtype(ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else dtype.label)


def smallest(dtype: DType) -> float:
    """Return the smallest subnormal of a float type."""
    return float(np.ones(1, f"u{dtype.itemsize}").view(numpy_type(dtype))[0])


def largest(dtype: DType) -> float:
    """Return the largest finite value of a float type: the one before infinity."""
    word = np.array([np.inf]).astype(numpy_type(dtype)).view(f"u{dtype.itemsize}")
    return float((word - 1).view(numpy_type(dtype))[0])


def unaligned(values: Array, shift: int) -> Array:
    """Return a copy of the values at an address that is ``shift`` bytes off an allocation."""
    buffer = np.zeros(values.nbytes + shift, np.uint8)
    array = buffer[shift:].view(values.dtype)
    array[...] = values
    return array


def random_values(dtype: DType, count: int, seed: int) -> Array:
    """Return values of every kind that the type has, special ones included."""
    random = np.random.default_rng(seed)
    if dtype is DType.BOOL:
        return random.integers(0, 2, count, np.uint8).astype(np.bool_)
    if dtype.is_integer:
        limits = np.iinfo(dtype.label)
        integers = random.integers(limits.min, limits.max, count, dtype.label, endpoint=True)
        least = np.array([limits.min, limits.max, 0, 1], dtype.label)
        integers[::7] = random.choice(least, integers[::7].size)
        return integers
    if dtype.is_complex:
        part = DType.FLOAT32 if dtype is DType.COMPLEX64 else DType.FLOAT64
        return random_values(part, 2 * count, seed).view(dtype.label)
    kind = numpy_type(dtype)
    tiny, large = smallest(dtype), largest(dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, tiny, -tiny, large, -large, 1.0]).astype(kind)
    values = random.standard_normal(count).astype(kind)
    if dtype in NARROW:
        values[1::3] = random.integers(0, 1 << 16, values[1::3].size, np.uint16).view(kind)
    values[::7] = special[random.integers(0, special.size, values[::7].size)]
    return values


def run(
    dtype: DType,
    reduction: Reduction,
    sources: Sequence[Array],
    target: Array,
    divisor: int = 1,
    *,
    partials: int = 0,
    partial_target: bool = False,
) -> Array:
    addresses = [source.ctypes.data for source in sources]
    reduce(
        dtype,
        reduction,
        divisor,
        target.size,
        addresses,
        target.ctypes.data,
        partials=partials,
        partial_target=partial_target,
    )
    return target


def smaller(a: Array, b: Array) -> Array:
    return np.where(np.less(a, b) | np.not_equal(a, a), a, b)


def larger(a: Array, b: Array) -> Array:
    return np.where(np.greater(a, b) | np.not_equal(a, a), a, b)


def product(a: Array, b: Array) -> Array:
    if not np.iscomplexobj(a):
        return np.multiply(a, b)
    # By hand: whether NumPy rounds its complex product once or twice depends on the machine.
    result = np.empty_like(a)
    np.subtract(a.real * b.real, a.imag * b.imag, out=result.real)
    np.add(a.real * b.imag, a.imag * b.real, out=result.imag)
    return result


COMBINE: dict[Reduction, Callable[[Array, Array], Array]] = {
    Reduction.SUM: np.add,
    Reduction.MEAN: np.add,
    Reduction.PROD: product,
    Reduction.MIN: smaller,
    Reduction.MAX: larger,
    Reduction.BAND: np.bitwise_and,
    Reduction.BOR: np.bitwise_or,
    Reduction.BXOR: np.bitwise_xor,
    Reduction.LAND: np.logical_and,
    Reduction.LOR: np.logical_or,
    Reduction.LXOR: np.logical_xor,
}
LOGICAL = (Reduction.LAND, Reduction.LOR, Reduction.LXOR)


def expected(
    dtype: DType, reduction: Reduction, sources: Sequence[Array], divisor: int, *, wide: bool = False
) -> Array:
    """Return what NumPy makes of it, in the order of the sources: rounded to ``dtype``, or its accumulator."""
    accumulator = numpy_type(dtype.accumulator)
    with np.errstate(all="ignore"):
        values = [source.astype(accumulator) for source in sources]
        value = values[0]
        if reduction in LOGICAL:
            value = np.not_equal(value, 0)
        for other in values[1:]:
            value = COMBINE[reduction](value, other)
        value = value.astype(accumulator)
        if reduction is Reduction.MEAN:
            parts = value.view(value.real.dtype)
            value = np.divide(parts, parts.dtype.type(divisor)).view(accumulator)
        return value if wide else value.astype(numpy_type(dtype))


def bits(values: Array) -> bytes:
    """Return the bits of the values, with one NaN for all: its sign and payload are nobody's promise."""
    canonical = values.copy()
    if canonical.dtype.kind == "c":
        canonical = canonical.view(canonical.real.dtype)
    if canonical.dtype.kind not in "iub":
        with np.errstate(invalid="ignore"):
            canonical[np.not_equal(canonical, canonical)] = np.nan
    return canonical.tobytes()
