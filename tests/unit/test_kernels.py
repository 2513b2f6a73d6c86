"""The reductions against NumPy: every dtype and operation, any number of inputs, any length, any address."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from allreduced.core.dtypes import DType
from allreduced.core.errors import InvalidArgument
from allreduced.core.reductions import Reduction, parse_reduction
from allreduced.daemon.kernels import instruction_set, reduce

Array: TypeAlias = "npt.NDArray[np.generic]"

COUNTS = (0, 1, 7, 63, 64, 65, 1000, 100_003)
SOURCES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 20)


def is_defined(dtype: DType, reduction: Reduction) -> bool:
    if reduction is Reduction.COPY:
        return True
    try:
        parse_reduction(reduction.label, dtype)
    except InvalidArgument:
        return False
    return True


PAIRS = [(dtype, reduction) for dtype in DType for reduction in Reduction if is_defined(dtype, reduction)]
all_pairs = pytest.mark.parametrize(
    ("dtype", "reduction"), PAIRS, ids=[f"{dtype.label}-{reduction.label}" for dtype, reduction in PAIRS]
)
floats = pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64], ids=lambda dtype: dtype.label)
integers = pytest.mark.parametrize("dtype", [DType.INT32, DType.INT64], ids=lambda dtype: dtype.label)


def unaligned(values: Array, shift: int) -> Array:
    """Return a copy of the values at an address that is ``shift`` bytes off an allocation."""
    buffer = np.zeros(values.nbytes + shift, np.uint8)
    array = np.frombuffer(buffer.data, values.dtype, values.size, shift)
    array[...] = values
    return array


def random_values(dtype: DType, count: int, seed: int) -> Array:
    """Return values of every kind that the type has, special ones included."""
    random = np.random.default_rng(seed)
    if dtype.is_integer:
        limits = np.iinfo(dtype.label)
        integers = random.integers(limits.min, limits.max, count, dtype.label, endpoint=True)
        integers[::7] = random.choice(np.array([limits.min, limits.max, 0, -1], dtype.label), integers[::7].size)
        return integers
    tiny = np.finfo(dtype.label).smallest_subnormal
    large = np.finfo(dtype.label).max
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, tiny, -tiny, large, -large], dtype.label)
    values = random.standard_normal(count).astype(dtype.label)
    values[::7] = random.choice(special, values[::7].size)
    return values


def run(dtype: DType, reduction: Reduction, sources: Sequence[Array], target: Array, divisor: int = 1) -> Array:
    reduce(dtype, reduction, divisor, target.size, [source.ctypes.data for source in sources], target.ctypes.data)
    return target


def smaller(a: Array, b: Array) -> Array:
    return np.where(np.less(a, b) | np.isnan(a), a, b)


def larger(a: Array, b: Array) -> Array:
    return np.where(np.greater(a, b) | np.isnan(a), a, b)


COMBINE: dict[Reduction, Callable[[Array, Array], Array]] = {
    Reduction.SUM: np.add,
    Reduction.MEAN: np.add,
    Reduction.PROD: np.multiply,
    Reduction.MIN: smaller,
    Reduction.MAX: larger,
}


def expected(reduction: Reduction, sources: Sequence[Array], divisor: int) -> Array:
    """Return what NumPy makes of it, in the order of the sources."""
    value = sources[0].copy()
    with np.errstate(all="ignore"):
        for source in sources[1:]:
            value = COMBINE[reduction](value, source)
        if reduction is Reduction.MEAN:
            value = np.divide(value, value.dtype.type(divisor))
    return value


def bits(values: Array) -> bytes:
    """Return the bits of the values, with one NaN for all: its sign and payload are nobody's promise."""
    canonical = values.copy()
    if canonical.dtype.kind == "f":
        canonical[np.isnan(canonical)] = np.nan
    return canonical.tobytes()


@all_pairs
def test_equals_numpy_bit_by_bit(dtype: DType, reduction: Reduction) -> None:
    inputs = [random_values(dtype, max(COUNTS), seed) for seed in range(max(SOURCES))]
    for number in SOURCES if reduction is not Reduction.COPY else (1,):
        for count in COUNTS:
            sources = [values[:count] for values in inputs[:number]]
            target = np.zeros(count, dtype.label)
            run(dtype, reduction, sources, target, divisor=number)
            assert bits(target) == bits(expected(reduction, sources, number)), (number, count)


@all_pairs
def test_any_address(dtype: DType, reduction: Reduction) -> None:
    for number in (1, 2, 5) if reduction is not Reduction.COPY else (1,):
        inputs = [random_values(dtype, 203, seed) for seed in range(number)]
        for shift in (1, 2, 3, 5, 8, 31):
            sources = [unaligned(values, shift + 3 * index) for index, values in enumerate(inputs)]
            target = unaligned(np.zeros_like(inputs[0]), shift)
            run(dtype, reduction, sources, target, divisor=7)
            assert bits(target) == bits(expected(reduction, inputs, 7)), (number, shift)


@all_pairs
def test_target_may_be_any_of_the_sources(dtype: DType, reduction: Reduction) -> None:
    for number in (1, 2, 9) if reduction is not Reduction.COPY else (1,):
        for place in {0, number // 2, number - 1}:
            sources = [random_values(dtype, 1003, seed) for seed in range(number)]
            result = expected(reduction, sources, 3)
            others = [source.copy() for source in sources]
            run(dtype, reduction, sources, sources[place], divisor=3)
            assert bits(sources[place]) == bits(result)
            for index in set(range(number)) - {place}:
                assert bits(sources[index]) == bits(others[index])


@all_pairs
def test_writes_nothing_beyond_the_target(dtype: DType, reduction: Reduction) -> None:
    for count in (0, 1, 7, 65):
        target = np.full(count + 64, 77, dtype.label)
        run(dtype, reduction, [random_values(dtype, count, 0)], target[32 : 32 + count])
        assert (target[:32] == 77).all()
        assert (target[32 + count :] == 77).all()


@floats
def test_min_and_max_propagate_nan_as_numpy_does(dtype: DType) -> None:
    a = np.array([1, np.nan, 1, np.nan, -np.inf, np.inf, 0.0] * 9, dtype.label)
    b = np.array([np.nan, 1, 2, np.nan, np.nan, 3, -0.0] * 9, dtype.label)
    out = np.zeros_like(a)
    np.testing.assert_array_equal(run(dtype, Reduction.MIN, [a, b], out), np.minimum(a, b))
    np.testing.assert_array_equal(run(dtype, Reduction.MAX, [a, b], out), np.maximum(a, b))


@floats
def test_signed_zeros_and_subnormals_are_kept(dtype: DType) -> None:
    tiny = np.finfo(dtype.label).smallest_subnormal
    a = np.array([-0.0, -0.0, tiny, 3 * tiny] * 9, dtype.label)
    b = np.array([-0.0, 0.0, tiny, -tiny] * 9, dtype.label)
    out = run(dtype, Reduction.SUM, [a, b], np.zeros_like(a))
    assert out[2] == 2 * tiny
    assert out[3] == 2 * tiny
    assert np.signbit(out[:2]).tolist() == [True, False]


@integers
def test_integers_wrap(dtype: DType) -> None:
    limits = np.iinfo(dtype.label)
    a = np.array([limits.max, limits.min, limits.max, 3] * 9, dtype.label)
    b = np.array([1, -1, limits.max, 5] * 9, dtype.label)
    total = run(dtype, Reduction.SUM, [a, b], np.zeros_like(a))
    assert total[:4].tolist() == [limits.min, limits.max, -2, 8]
    product = run(dtype, Reduction.PROD, [a, b], np.zeros_like(a))
    assert product[:4].tolist() == [limits.max, limits.min, 1, 15]


@floats
def test_values_are_added_in_the_order_of_the_sources(dtype: DType) -> None:
    big = 1 / np.finfo(dtype.label).eps * 4
    big_first = [np.full(100, value, dtype.label) for value in (big, 1.0, -big)]
    big_last = [np.full(100, value, dtype.label) for value in (big, -big, 1.0)]
    assert run(dtype, Reduction.SUM, big_first, np.zeros(100, dtype.label))[0] == 0
    assert run(dtype, Reduction.SUM, big_last, np.zeros(100, dtype.label))[0] == 1


@floats
def test_mean_divides_by_the_divisor_and_not_by_the_number_of_sources(dtype: DType) -> None:
    sources = [np.full(9, 10.0, dtype.label), np.full(9, 20.0, dtype.label)]
    assert run(dtype, Reduction.MEAN, sources, np.zeros(9, dtype.label), divisor=12)[8] == 2.5


def test_the_table_is_that_of_core() -> None:
    memory = np.zeros(4, np.complex128)
    address = memory.ctypes.data
    for dtype in DType:
        for reduction in Reduction:
            if is_defined(dtype, reduction):
                reduce(dtype, reduction, 1, 1, [address], address)
            else:
                with pytest.raises(ValueError, match="not defined for dtype code"):
                    reduce(dtype, reduction, 1, 1, [address], address)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1, 1, [64], 64), "unknown dtype code 0"),
        ((-1, 1, 1, 1, [64], 64), "unknown dtype code -1"),
        ((250, 1, 1, 1, [64], 64), "unknown dtype code 250"),
        ((1, -1, 1, 1, [64], 64), "unknown reduction code -1"),
        ((1, 250, 1, 1, [64], 64), "unknown reduction code 250"),
        ((1, 1, 0, 1, [64], 64), "divisor must be at least 1, got 0"),
        ((1, 1, 1, -1, [64], 64), "count must be between 0 and .*, got -1"),
        ((1, 1, 1, 2**62, [64], 64), "count must be between 0 and .*, got 4611686018427387904"),
        ((1, 1, 1, 1, [], 64), "sources is empty"),
        ((1, 1, 1, 1, [64] * 70_000, 64), "sources has 70000 entries"),
        ((1, 0, 1, 1, [64, 64], 64), "copy takes one source, got 2"),
        ((1, 1, 1, 1, [64, 0], 64), "a source address is 0"),
        ((1, 1, 1, 1, [64], 0), "the target address is 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[int, int, int, int, list[int], int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reduce(*arguments)


@pytest.mark.parametrize("sources", ["abc", [None], [-1], 5, [1.5]])
def test_wrong_types_are_refused(sources: object) -> None:
    with pytest.raises(TypeError, match="sources"):
        reduce(1, 1, 1, 1, sources, 64)  # type: ignore[arg-type] # that is the test


# What the interpreter of the next tests prints: the bits of everything above, as its instruction set makes them.
DIGEST = """
import hashlib, runpy, sys
module = runpy.run_path(sys.argv[1])
digest = hashlib.sha256()
for dtype, reduction in module["PAIRS"]:
    inputs = [module["random_values"](dtype, 1003, seed) for seed in range(20)]
    for number in module["SOURCES"] if reduction else (1,):
        for count in (1, 7, 64, 1003):
            target = inputs[0][:count].copy()
            module["run"](dtype, reduction, [values[:count] for values in inputs[:number]], target, number)
            digest.update(module["bits"](target))
print(module["instruction_set"](), digest.hexdigest())
"""


def interpreter(cap: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ALLREDUCED_KERNELS_ISA": cap}
    command = [sys.executable, "-c", DIGEST, __file__]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_all_instruction_sets_give_the_same_bits() -> None:
    best = instruction_set()
    names = ["baseline", "avx2", "avx512"]
    caps = names[: names.index(best) + 1] if best in names else ["baseline", best]
    digests = {}
    for cap in caps:
        done = interpreter(cap)
        assert done.returncode == 0, done.stderr
        ran, digest = done.stdout.split()
        assert ran == cap
        digests[cap] = digest
    assert len(set(digests.values())) == 1, digests


def test_an_unknown_instruction_set_fails_the_import() -> None:
    done = interpreter("mmx")
    assert done.returncode != 0
    assert re.search(r"ALLREDUCED_KERNELS_ISA=mmx is not known; there are .*baseline", done.stderr)
