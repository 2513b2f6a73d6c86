"""16-bit floats: conversions of every value, one rounding per pass, and partial results in float32."""

from __future__ import annotations

import select

import numpy as np
import numpy.typing as npt
import pytest
from tests.unit.reduction_oracle import (
    NARROW,
    Array,
    bits,
    expected,
    largest,
    numpy_type,
    random_values,
    run,
    smallest,
    unaligned,
)

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction, reductions_of
from allreduced.daemon.kernels import Pool, reduce

narrow = pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: dtype.label)
REDUCTIONS = sorted(reductions_of(DType.FLOAT16) - {Reduction.COPY})


def every(dtype: DType) -> Array:
    """Return all 65,536 values, infinities and NaN among them."""
    return np.arange(1 << 16, dtype=np.uint16).view(numpy_type(dtype))


def widened(dtype: DType, values: Array) -> npt.NDArray[np.float32]:
    target = np.zeros(values.size, np.float32)
    run(dtype, Reduction.COPY, [values], target, partial_target=True)
    return target


def narrowed(dtype: DType, values: npt.NDArray[np.float32]) -> Array:
    return run(dtype, Reduction.COPY, [values], np.zeros(values.size, numpy_type(dtype)), partials=1)


@narrow
def test_every_value_widens_as_numpy_does(dtype: DType) -> None:
    assert bits(widened(dtype, every(dtype))) == bits(every(dtype).astype(np.float32))


@narrow
def test_every_value_comes_back(dtype: DType) -> None:
    assert bits(narrowed(dtype, widened(dtype, every(dtype)))) == bits(every(dtype))


@narrow
def test_every_tie_and_its_neighbours_round_as_numpy_does(dtype: DType) -> None:
    magnitudes = every(dtype)[: 1 << 15].astype(np.float32)
    finite = magnitudes[np.isfinite(magnitudes)].astype(np.float64)
    beyond = 2 * finite[-1] - finite[-2]  # what follows the largest one; from its tie on, infinity
    ties = ((finite + np.append(finite[1:], beyond)) / 2).astype(np.float32)
    below = np.nextafter(ties, np.float32(0))
    above = np.nextafter(ties, np.float32(np.inf))
    values = np.concatenate([ties, below, above, -ties, -below, -above])
    with np.errstate(over="ignore"):
        assert bits(narrowed(dtype, values)) == bits(values.astype(numpy_type(dtype)))
    even = narrowed(dtype, ties).view(np.uint16)
    assert (even % 2 == 0).all()


@narrow
def test_floats_of_any_bits_round_as_numpy_does(dtype: DType) -> None:
    words = np.random.default_rng(3).integers(0, 1 << 32, 300_001, np.uint32)
    values = words.view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        assert bits(narrowed(dtype, values)) == bits(values.astype(numpy_type(dtype)))


@narrow
def test_overflow_is_infinity_and_underflow_is_zero(dtype: DType) -> None:
    over = np.nextafter(np.float32(np.inf), np.float32(0))  # the largest float32 is beyond both
    tiny = np.float32(smallest(DType.FLOAT32))
    values = np.array([over, -over, np.inf, -np.inf, tiny, -tiny], np.float32)
    out = narrowed(dtype, values).astype(np.float32)
    assert out.tolist() == [np.inf, -np.inf, np.inf, -np.inf, 0.0, 0.0]
    assert np.signbit(out).tolist() == [False, True, False, True, False, True]


@narrow
def test_nan_stays_nan_and_quiet_with_its_sign(dtype: DType) -> None:
    signalling = np.array([0x7F800001, 0xFF800001, 0x7FBFFFFF, 0x7FC00000, 0xFFFFFFFF], np.uint32).view(np.float32)
    out = narrowed(dtype, signalling)
    quiet = 0x0200 if dtype is DType.FLOAT16 else 0x0040
    assert np.isnan(out.astype(np.float32)).all()
    assert (out.view(np.uint16) & quiet).all()
    assert np.signbit(out).tolist() == [False, True, False, False, True]


@narrow
def test_a_pass_rounds_once(dtype: DType) -> None:
    step = 2048 if dtype is DType.FLOAT16 else 256  # from here on, adding 1 alone is lost
    kind = numpy_type(dtype)
    sources = [np.full(77, value, kind) for value in (step, 1, 1)]
    assert run(dtype, Reduction.SUM, sources, np.zeros(77, kind)).astype(int).tolist() == [step + 2] * 77


def test_a_sum_may_leave_the_range_of_float16_on_its_way() -> None:
    sources = [np.full(77, value, np.float16) for value in (60_000, 60_000, -60_000)]
    assert run(DType.FLOAT16, Reduction.SUM, sources, np.zeros(77, np.float16)).tolist() == [60_000] * 77


@narrow
def test_mean_divides_before_it_rounds(dtype: DType) -> None:
    large = largest(dtype) if dtype is DType.FLOAT16 else 2.0**126  # twice the largest bfloat16 is no float32 either
    values = np.full(77, large, numpy_type(dtype))
    out = run(dtype, Reduction.MEAN, [values, values], np.zeros_like(values), divisor=2)
    assert bits(out) == bits(values)


@narrow
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda reduction: reduction.label)
def test_partial_results_mix_with_elements(dtype: DType, reduction: Reduction) -> None:
    count = 203
    own = [random_values(dtype, count, seed) for seed in range(3)]
    partials = [random_values(DType.FLOAT32, count, 10 + seed) for seed in range(3)]
    for elements in range(4):
        for floats in range(4):
            if elements + floats == 0:
                continue
            sources = [*own[:elements], *partials[:floats]]
            for wide in (False, True):
                target = np.zeros(count, np.float32 if wide else numpy_type(dtype))
                run(dtype, reduction, sources, target, 3, partials=floats, partial_target=wide)
                assert bits(target) == bits(expected(dtype, reduction, sources, 3, wide=wide)), (elements, floats, wide)


@narrow
def test_partial_results_at_any_address_and_of_any_length(dtype: DType) -> None:
    for count in (0, 1, 3, 7, 8, 9, 31, 32, 33, 64, 65, 1000):
        own = unaligned(random_values(dtype, count, 1), 1)
        partial = unaligned(random_values(DType.FLOAT32, count, 2), 3)
        for wide in (False, True):
            memory = np.full(count + 64, 7, np.float32 if wide else numpy_type(dtype))
            target = memory[32 : 32 + count]
            run(dtype, Reduction.SUM, [own, partial], target, partials=1, partial_target=wide)
            assert bits(target) == bits(expected(dtype, Reduction.SUM, [own, partial], 1, wide=wide))
            assert (memory[:32] == 7).all()
            assert (memory[32 + count :] == 7).all()


@narrow
def test_hops_with_partial_results_give_the_bits_of_one_pass(dtype: DType) -> None:
    a, b, c, d = (random_values(dtype, 999, seed) for seed in range(4))
    whole = run(dtype, Reduction.MEAN, [a, b, c, d], np.zeros_like(a), 4)
    partial = np.zeros(999, np.float32)
    run(dtype, Reduction.SUM, [a, b], partial, partial_target=True)
    run(dtype, Reduction.SUM, [c, partial], partial, partials=1, partial_target=True)
    out = run(dtype, Reduction.MEAN, [d, partial], np.zeros_like(a), 4, partials=1)
    assert bits(out) == bits(whole)


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype not in NARROW], ids=lambda dtype: dtype.label)
def test_other_types_are_their_own_partial_results(dtype: DType) -> None:
    a, b = random_values(dtype, 501, 1), random_values(dtype, 501, 2)
    for reduction in reductions_of(dtype) - {Reduction.COPY}:
        plain = run(dtype, reduction, [a, b], np.zeros_like(a), 2)
        partial = run(dtype, reduction, [a, b], np.zeros_like(a), 2, partials=1, partial_target=True)
        assert partial.tobytes() == plain.tobytes()


@narrow
def test_a_copy_of_partial_results_keeps_every_bit(dtype: DType) -> None:
    words = np.random.default_rng(4).integers(0, 1 << 32, 1001, np.uint32)
    target = np.zeros_like(words)
    run(dtype, Reduction.COPY, [words], target, partials=1, partial_target=True)
    assert target.tobytes() == words.tobytes()


def test_the_pool_takes_partial_results_and_cuts_them() -> None:
    count = 300_007
    own = random_values(DType.BFLOAT16, count, 1)
    partial = random_values(DType.FLOAT32, count, 2)
    rounded, wide = np.zeros_like(own), np.zeros_like(partial)
    sources = [own.ctypes.data, partial.ctypes.data]
    pool = Pool(2)
    try:
        pool.submit(1, DType.BFLOAT16, Reduction.SUM, 1, count, sources, rounded.ctypes.data, partials=1)
        into = wide.ctypes.data
        pool.submit(2, DType.BFLOAT16, Reduction.SUM, 1, count, sources, into, 5, partials=1, partial_target=True)
        done: list[int] = []
        while len(done) < 2:
            assert select.select([pool.fileno()], [], [], 60.0)[0]
            done += pool.completed()
    finally:
        pool.close()
    assert sorted(done) == [1, 2]
    assert bits(rounded) == bits(expected(DType.BFLOAT16, Reduction.SUM, [own, partial], 1))
    assert bits(wide) == bits(expected(DType.BFLOAT16, Reduction.SUM, [own, partial], 1, wide=True))


@pytest.mark.parametrize("partials", [-1, 3])
def test_as_many_partial_results_as_sources_at_most(partials: int) -> None:
    with pytest.raises(ValueError, match=f"partials must be between 0 and the number of sources, got {partials}"):
        reduce(DType.FLOAT16, Reduction.SUM, 1, 1, [64, 64], 640, partials=partials)


@narrow
def test_a_target_in_place_of_a_source_of_another_size_is_refused(dtype: DType) -> None:
    with pytest.raises(ValueError, match="another size"):
        reduce(dtype, Reduction.SUM, 1, 1, [64, 128], 64, partial_target=True)
    with pytest.raises(ValueError, match="another size"):
        reduce(dtype, Reduction.SUM, 1, 1, [64, 128], 128, partials=1)
