"""The reductions against NumPy: every dtype and operation, any number of inputs, any length, any address."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.unit.reduction_oracle import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    LOGICAL,
    bits,
    expected,
    numpy_type,
    random_values,
    run,
    smallest,
    unaligned,
)

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction, reductions_of
from allreduced.daemon.kernels import instruction_set, reduce

COUNTS = (0, 1, 7, 63, 64, 65, 1000, 20_003)
SOURCES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 20)
REPOSITORY = Path(__file__).parents[2]


def label(value: object) -> str:
    return value.label if isinstance(value, DType | Reduction) else str(value)


every_dtype = pytest.mark.parametrize("dtype", DType, ids=label)
floats = pytest.mark.parametrize("dtype", FLOATS, ids=label)
integers = pytest.mark.parametrize("dtype", INTEGERS, ids=label)


def numbers(reduction: Reduction, *of: int) -> tuple[int, ...]:
    """Return how many sources to try: a copy takes one."""
    return of if reduction is not Reduction.COPY else (1,)


@every_dtype
def test_equals_numpy_bit_by_bit(dtype: DType) -> None:
    inputs = [random_values(dtype, max(COUNTS), seed) for seed in range(max(SOURCES))]
    for reduction in sorted(reductions_of(dtype)):
        for number in numbers(reduction, *SOURCES):
            result = expected(dtype, reduction, inputs[:number], number)
            for count in COUNTS:
                sources = [values[:count] for values in inputs[:number]]
                target = np.zeros(count, numpy_type(dtype))
                run(dtype, reduction, sources, target, divisor=number)
                assert bits(target) == bits(result[:count]), (reduction, number, count)


@every_dtype
def test_any_address(dtype: DType) -> None:
    for reduction in sorted(reductions_of(dtype)):
        for number in numbers(reduction, 1, 2, 5):
            inputs = [random_values(dtype, 203, seed) for seed in range(number)]
            for shift in (1, 2, 3, 5, 8, 31):
                sources = [unaligned(values, shift + 3 * index) for index, values in enumerate(inputs)]
                target = unaligned(np.zeros_like(inputs[0]), shift)
                run(dtype, reduction, sources, target, divisor=7)
                assert bits(target) == bits(expected(dtype, reduction, inputs, 7)), (reduction, number, shift)


@every_dtype
def test_target_may_be_any_of_the_sources(dtype: DType) -> None:
    for reduction in sorted(reductions_of(dtype)):
        for number in numbers(reduction, 1, 2, 9):
            for place in {0, number // 2, number - 1}:
                sources = [random_values(dtype, 1003, seed) for seed in range(number)]
                result = expected(dtype, reduction, sources, 3)
                others = [source.copy() for source in sources]
                run(dtype, reduction, sources, sources[place], divisor=3)
                assert bits(sources[place]) == bits(result), (reduction, number, place)
                for index in set(range(number)) - {place}:
                    assert bits(sources[index]) == bits(others[index])


@every_dtype
def test_writes_nothing_beyond_the_target(dtype: DType) -> None:
    for reduction in sorted(reductions_of(dtype)):
        for count in (0, 1, 7, 65):
            target = np.full(count + 64, 77, numpy_type(dtype))
            guard = target[0]
            run(dtype, reduction, [random_values(dtype, count, 0)], target[32 : 32 + count])
            assert (target[:32] == guard).all()
            assert (target[32 + count :] == guard).all()


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=label)
@pytest.mark.parametrize("shift", [0, 4, 64])
def test_large_targets_are_stored_past_the_cache_and_hold_the_same(dtype: DType, shift: int) -> None:
    # From 16 MiB on, where the target begins at a whole vector; else as small ones. The length divides by nothing.
    count = (16 << 20) // dtype.itemsize + 77
    end = count * dtype.itemsize
    sources = [random_values(dtype, count, seed) for seed in range(3)]
    memory = np.full(end + 4096, 0xA5, np.uint8)
    begin = -memory.ctypes.data % 64 + shift
    target = memory[begin : begin + end].view(numpy_type(dtype))
    run(dtype, Reduction.MEAN, sources, target, divisor=3)
    mean = expected(dtype, Reduction.MEAN, sources, 3)
    assert bits(target) == bits(mean)
    assert (memory[:begin] == 0xA5).all()
    assert (memory[begin + end :] == 0xA5).all()
    run(dtype, Reduction.SUM, [target, sources[0]], target)
    assert bits(target) == bits(expected(dtype, Reduction.SUM, [mean, sources[0]], 1))


@every_dtype
def test_a_copy_keeps_every_bit(dtype: DType) -> None:
    pattern = np.random.default_rng(5).integers(0, 256, 4096 * dtype.itemsize, np.uint8)
    target = np.zeros_like(pattern)
    reduce(dtype, Reduction.COPY, 1, 4096, [pattern.ctypes.data], target.ctypes.data)
    assert target.tobytes() == pattern.tobytes()


@floats
def test_min_and_max_propagate_nan_as_numpy_does(dtype: DType) -> None:
    kind = numpy_type(dtype)
    a = np.array([1, np.nan, 1, np.nan, -np.inf, np.inf] * 9, kind)
    b = np.array([np.nan, 1, 2, np.nan, np.nan, 3] * 9, kind)
    out = np.zeros_like(a)
    with np.errstate(invalid="ignore"):  # ml_dtypes warns
        least, greatest = np.minimum(a, b), np.maximum(a, b)
    assert bits(run(dtype, Reduction.MIN, [a, b], out)) == bits(least)
    assert bits(run(dtype, Reduction.MAX, [a, b], out)) == bits(greatest)


@floats
def test_signed_zeros_and_subnormals_are_kept(dtype: DType) -> None:
    kind = numpy_type(dtype)
    tiny = smallest(dtype)
    a = np.array([-0.0, -0.0, tiny, 3 * tiny] * 9, kind)
    b = np.array([-0.0, 0.0, tiny, -tiny] * 9, kind)
    out = run(dtype, Reduction.SUM, [a, b], np.zeros_like(a))
    assert out[2] == 2 * tiny
    assert out[3] == 2 * tiny
    assert np.signbit(out[:2]).tolist() == [True, False]


@floats
def test_of_two_zeros_min_and_max_take_the_second(dtype: DType) -> None:
    kind = numpy_type(dtype)
    a = np.array([-0.0, 0.0] * 20, kind)
    b = np.array([0.0, -0.0] * 20, kind)
    for reduction in (Reduction.MIN, Reduction.MAX):
        out = run(dtype, reduction, [a, b], np.ones_like(a))
        assert np.signbit(out[:2]).tolist() == [False, True]


@integers
def test_integers_wrap(dtype: DType) -> None:
    limits = np.iinfo(dtype.label)
    a = np.array([limits.max, limits.min, limits.max, 3] * 20, dtype.label)
    b = np.array([1, -1 if limits.min else limits.max, limits.max, 5] * 20, dtype.label)
    total = run(dtype, Reduction.SUM, [a, b], np.zeros_like(a))
    assert total[:4].tolist() == [limits.min, limits.max, -2 if limits.min else limits.max - 1, 8]
    product = run(dtype, Reduction.PROD, [a, b], np.zeros_like(a))
    assert product[:4].tolist() == [limits.max, limits.min, 1, 15]


@integers
def test_integers_are_ordered_by_their_sign(dtype: DType) -> None:
    limits = np.iinfo(dtype.label)
    a = np.array([limits.min, limits.max, 5] * 30, dtype.label)
    b = np.array([limits.max, limits.min, 6] * 30, dtype.label)
    assert run(dtype, Reduction.MIN, [a, b], np.ones_like(a))[:3].tolist() == [limits.min, limits.min, 5]
    assert run(dtype, Reduction.MAX, [a, b], np.ones_like(a))[:3].tolist() == [limits.max, limits.max, 6]


def test_every_reduction_of_bool_is_a_table_of_truth() -> None:
    a = np.array([False, False, True, True] * 20)
    b = np.array([False, True, False, True] * 20)
    every, some, odd = [False, False, False, True], [False, True, True, True], [False, True, True, False]
    tables = {
        Reduction.SUM: some,
        Reduction.PROD: every,
        Reduction.MIN: every,
        Reduction.MAX: some,
        Reduction.BAND: every,
        Reduction.BOR: some,
        Reduction.BXOR: odd,
        Reduction.LAND: every,
        Reduction.LOR: some,
        Reduction.LXOR: odd,
    }
    assert set(tables) | {Reduction.COPY} == reductions_of(DType.BOOL)
    for reduction, table in tables.items():
        assert run(DType.BOOL, reduction, [a, b], np.zeros_like(a))[:4].tolist() == table, reduction


def test_any_byte_but_0_is_true() -> None:
    values = np.arange(256, dtype=np.uint8)
    for reduction in reductions_of(DType.BOOL) - {Reduction.COPY}:
        alone = run(DType.BOOL, reduction, [values], np.full(256, 9, np.uint8))
        assert alone.tolist() == [0] + [1] * 255
        odd = reduction in (Reduction.BXOR, Reduction.LXOR)
        twice = run(DType.BOOL, reduction, [values, values[::-1].copy()], np.full(256, 9, np.uint8))
        assert twice[1:-1].tolist() == [0 if odd else 1] * 254


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if not dtype.is_complex], ids=label)
def test_logical_results_are_0_and_1_of_the_type(dtype: DType) -> None:
    kind = numpy_type(dtype)
    values = np.array([0, 1, 3, 100] * 20).astype(kind)
    for reduction in LOGICAL:
        assert run(dtype, reduction, [values], np.zeros_like(values))[:4].astype(int).tolist() == [0, 1, 1, 1]
        for number in (1, 2, 3):
            out = run(dtype, reduction, [values] * number, np.zeros_like(values))
            assert set(out.astype(float).tolist()) <= {0.0, 1.0}


@floats
def test_nan_is_true_and_negative_zero_is_false(dtype: DType) -> None:
    values = np.array([np.nan, -0.0, -np.inf] * 20, numpy_type(dtype))
    one = np.ones_like(values)
    out = run(dtype, Reduction.LAND, [values, one], np.zeros_like(values))
    assert out[:3].astype(float).tolist() == [1.0, 0.0, 1.0]


@floats
def test_values_are_added_in_the_order_of_the_sources(dtype: DType) -> None:
    kind = numpy_type(dtype)
    if dtype is DType.FLOAT16:
        big, small = 2.0**15, 2.0**-12  # float32, which adds them, has no place for both
    else:
        big, small = 4 / float(np.finfo(dtype.accumulator.label).eps), 1.0
    big_first = [np.full(100, value).astype(kind) for value in (big, small, -big)]
    big_last = [np.full(100, value).astype(kind) for value in (big, -big, small)]
    assert run(dtype, Reduction.SUM, big_first, np.zeros(100, kind))[0] == 0
    assert run(dtype, Reduction.SUM, big_last, np.zeros(100, kind))[0] == small


@floats
def test_mean_divides_by_the_divisor_and_not_by_the_number_of_sources(dtype: DType) -> None:
    kind = numpy_type(dtype)
    sources = [np.full(9, 10.0, kind), np.full(9, 20.0, kind)]
    assert run(dtype, Reduction.MEAN, sources, np.zeros(9, kind), divisor=12)[8] == 2.5


@pytest.mark.parametrize("dtype", COMPLEX, ids=label)
def test_complex_numbers_are_pairs(dtype: DType) -> None:
    a = np.array([1 + 2j, -0.5j, 3] * 9, dtype.label)
    b = np.array([3 - 1j, 4 + 2j, 1j] * 9, dtype.label)
    out = np.zeros_like(a)
    assert run(dtype, Reduction.SUM, [a, b], out)[:3].tolist() == [4 + 1j, 4 + 1.5j, 3 + 1j]
    assert run(dtype, Reduction.PROD, [a, b], out)[:3].tolist() == [5 + 5j, 1 - 2j, 3j]
    assert run(dtype, Reduction.MEAN, [a, b], out, divisor=2)[:3].tolist() == [2 + 0.5j, 2 + 0.75j, 1.5 + 0.5j]


def test_the_table_is_that_of_core() -> None:
    memory = np.zeros(4, np.complex128)
    address = memory.ctypes.data
    for dtype in DType:
        for reduction in Reduction:
            if reduction in reductions_of(dtype):
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
import hashlib
import numpy as np
from allreduced.core.reductions import Reduction
from allreduced.daemon.kernels import instruction_set
from tests.unit.reduction_oracle import NARROW, PAIRS, bits, random_values, run
digest = hashlib.sha256()
for dtype, reduction in PAIRS:
    inputs = [random_values(dtype, 1003, seed) for seed in range(20)]
    for number in (1, 2, 3, 4, 5, 9, 20) if reduction else (1,):
        for count in (1, 7, 64, 1003):
            target = inputs[0][:count].copy()
            run(dtype, reduction, [values[:count] for values in inputs[:number]], target, number)
            digest.update(bits(target))
# Conversions, NaN with its payload too.
for dtype in NARROW:
    wide = np.zeros(1 << 16, np.float32)
    digest.update(run(dtype, Reduction.COPY, [np.arange(1 << 16, dtype=np.uint16)], wide, partial_target=True))
    words = np.arange(1 << 18, dtype=np.uint32) * 16411
    digest.update(run(dtype, Reduction.COPY, [words], np.zeros(1 << 18, np.uint16), partials=1))
print(instruction_set(), digest.hexdigest())
"""


def interpreter(cap: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ALLREDUCED_KERNELS_ISA": cap}
    command = [sys.executable, "-c", DIGEST]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


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
