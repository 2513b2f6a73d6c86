"""What each rank gives to each operation, numbers that no other call has, and what must come out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from tests.simulation.kernels import numpy_dtype
from tests.simulation.oracle import canonical_order, expected
from tests.simulation.whole.scenario import OperationPlan

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction
from allreduced.schedules.select import schedule_for


def data_of(group: int, operation: int, rank: int, dtype: DType, count: int) -> npt.NDArray[np.generic]:
    """Return the elements; their sum depends on the order where the type can show it."""
    draw = random.Random(hash((group, operation, rank)))
    if dtype.is_integer:
        return np.frombuffer(bytearray(draw.randbytes(count * dtype.itemsize)), numpy_dtype(dtype))
    raw = np.frombuffer(draw.randbytes(2 * count), np.int16).astype(np.float64)
    values = (raw / 977.0) ** 3 if dtype.itemsize > 2 else raw / 977.0
    return values.astype(numpy_dtype(dtype))


def result_of(
    operation: OperationPlan, inputs: Mapping[int, npt.NDArray[np.generic]], members: Sequence[Sequence[int]]
) -> bytes:
    """Return the result for the inputs by rank, where ``members[i]`` are the ranks of member ``i``."""
    if not operation.count:
        return b""
    if operation.kind == "broadcast":
        return inputs[operation.root].tobytes()
    dtype, reduction = DType(operation.dtype), Reduction(operation.op)
    if operation.algorithm == "canonical":
        return canonical_order(dtype, reduction, inputs, members).tobytes()
    schedule = schedule_for(operation.kind, operation.algorithm or "direct", len(members), -1)
    size = sum(map(len, members))
    return expected(schedule, dtype, reduction, size, inputs, members).tobytes()
