"""What ``allreduced bench`` measures, as one rank of a job: time and correctness of a collective over a range of sizes.

The definitions are those of nccl-tests: algbw is the size divided by the time of one call; busbw is algbw times the
share of that size which must cross the slowest connection, so that it can be compared with the speed of the hardware:
2(n-1)/n for all_reduce over n ranks, 1 for broadcast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from allreduced.core.dtypes import parse_dtype

if TYPE_CHECKING:
    from allreduced.client import Communicator

Array: TypeAlias = "NDArray[np.generic]"

_FUNCTIONS: Mapping[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
}


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is measured. ``begin`` and ``end``: bytes, both included; the next size is ``factor`` times the last.

    ``view``: inputs live in shared memory and results are read there; else both are copied, as with plain arrays.
    """

    collective: str
    dtype: str
    op: str
    begin: int
    end: int
    factor: int
    warmup: int
    iterations: int
    view: bool
    check: bool
    algorithm: str = ""
    """What is asked for; empty leaves it to the agents."""

    def counts(self) -> Iterator[int]:
        """Yield the numbers of elements, each once."""
        itemsize = np.dtype(self.dtype).itemsize
        nbytes, last = self.begin, -1
        while nbytes <= self.end:
            count = nbytes // itemsize
            if count != last:
                yield count
            last = count
            nbytes = max(nbytes * self.factor, 1)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row. ``seconds``: mean time of a call over all ranks; ``wrong``: elements of all ranks, None if unchecked.

    ``algbw`` and ``busbw`` are in bytes per second.
    """

    nbytes: int
    count: int
    seconds: float
    algbw: float
    busbw: float
    wrong: int | None


def measure(comm: Communicator, sweep: Sweep) -> Iterator[Measurement]:
    """Measure every size on all ranks together; each rank yields the same rows."""
    for count in sweep.counts():
        values = input_of(comm.rank, comm.size, count, sweep)
        source = comm.empty(values.shape, sweep.dtype) if sweep.view else values
        source[...] = values
        for _ in range(sweep.warmup):
            _call(comm, source, sweep)
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(sweep.iterations):
            _call(comm, source, sweep)
        mine = (time.perf_counter() - begin) / sweep.iterations
        seconds = float(comm.all_reduce(np.array([mine]), op="mean")[0])
        wrong = None
        if sweep.check:
            bad = int(np.count_nonzero(np.asarray(_call(comm, source, sweep)) != result_of(comm.size, count, sweep)))
            wrong = int(comm.all_reduce(np.array([bad]), op="sum")[0])
        nbytes = values.nbytes
        algbw = nbytes / seconds
        yield Measurement(nbytes, count, seconds, algbw, algbw * bus_factor(sweep.collective, comm.size), wrong)


def bus_factor(collective: str, size: int) -> float:
    """Return busbw divided by algbw."""
    return 2.0 * (size - 1) / size if collective == "all_reduce" else 1.0


def _call(comm: Communicator, source: Array, sweep: Sweep) -> Array:
    if sweep.collective == "broadcast":
        return comm.broadcast(source, root=0, view=sweep.view, algorithm=sweep.algorithm)
    return comm.all_reduce(source, op=sweep.op, view=sweep.view, algorithm=sweep.algorithm)


def input_of(rank: int, size: int, count: int, sweep: Sweep) -> Array:
    """Return values whose reduction over the ranks is exact in every type: small whole numbers, for prod 1 and 2."""
    positions = np.arange(count, dtype=np.int64)
    if sweep.op == "prod" and sweep.collective == "all_reduce":
        values = 1 + ((positions + rank) % size == 0)
    elif sweep.op in ("land", "lor", "lxor"):
        values = (positions + rank) % 3
    else:
        values = 1 + (positions + rank) % 7
    typed: Array = values.astype(sweep.dtype)
    return typed


def result_of(size: int, count: int, sweep: Sweep) -> Array:
    """Return what every rank must get, exactly."""
    if sweep.collective == "broadcast":
        return input_of(0, size, count, sweep)
    function = _FUNCTIONS[sweep.op]
    accumulator = parse_dtype(sweep.dtype).accumulator.label
    inputs = (input_of(rank, size, count, sweep).astype(accumulator) for rank in range(size))
    total = reduce(lambda a, b: function(a, b), inputs)
    if sweep.op in ("land", "lor", "lxor"):
        total = total != 0  # also where there is one rank only
    if sweep.op == "mean":
        parts = total.view(total.real.dtype)  # of a complex number both, each divided by itself
        np.divide(parts, parts.dtype.type(size), out=parts)
    exact: Array = total.astype(sweep.dtype)
    return exact
