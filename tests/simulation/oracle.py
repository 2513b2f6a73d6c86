"""What a schedule must give, by the documented order of reduction and without tiles, time or messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from tests.simulation.kernels import fold

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.program import BlockPlan, Program, compile_program
from allreduced.schedules.schedule import Schedule, block_bounds


def expected(
    schedule: Schedule,
    dtype: DType,
    reduction: Reduction,
    size: int,
    inputs: Mapping[int, npt.NDArray[np.generic]],
    members: Sequence[Sequence[int]],
) -> npt.NDArray[np.generic]:
    """Return the result for ``inputs`` by rank, where ``members[i]`` are the ranks of member ``i``."""
    programs = [compile_program(schedule, member) for member in range(schedule.members)]
    first = next(iter(inputs.values()))
    bounds = block_bounds(len(first), schedule.blocks)
    pieces = []
    for block in range(schedule.blocks):
        span = slice(bounds[block], bounds[block + 1])
        pieces.append(_block(programs, block, span, dtype, reduction, size, inputs, members))
    return np.concatenate(pieces)


def canonical_order(
    dtype: DType,
    reduction: Reduction,
    inputs: Mapping[int, npt.NDArray[np.generic]],
    members: Sequence[Sequence[int]],
) -> npt.NDArray[np.generic]:
    """Return what docs/numerics.md says of the canonical order, in a line: it knows no schedule, block or tile."""
    if len(members) == 1:
        return fold(dtype, reduction, len(members[0]), [inputs[rank] for rank in sorted(members[0])])
    partial = Reduction.SUM if reduction is Reduction.MEAN else reduction
    nodes = [fold(dtype, partial, 1, [inputs[rank] for rank in sorted(ranks)]) for ranks in members]
    return fold(dtype, reduction, sum(map(len, members)), nodes)


def _block(
    programs: Sequence[Program],
    block: int,
    span: slice,
    dtype: DType,
    reduction: Reduction,
    size: int,
    inputs: Mapping[int, npt.NDArray[np.generic]],
    members: Sequence[Sequence[int]],
) -> npt.NDArray[np.generic]:
    """Return what every member ends with for one block; fails if they differ."""
    partial = Reduction.SUM if reduction is Reduction.MEAN else reduction
    wide = programs[0].wide and reduction in (Reduction.SUM, Reduction.MEAN, Reduction.PROD)
    plans = [program.blocks[block] for program in programs]

    @cache
    def value(member: int, level: int) -> npt.NDArray[np.generic]:
        plan = plans[member]
        final = not plan.levels if level == 0 else plan.levels[level - 1].final
        how = reduction if final else partial
        local = [inputs[rank][span] for rank in members[member] if rank in inputs]
        if level == 0:
            return fold(dtype, how, size, local, wide=wide and not final)
        step = plan.levels[level - 1]
        received = [value(peer, _level_sent(plans[peer], step.step, member)) for peer in step.peers]
        if step.copy:
            return received[0]
        fused = level == 1 and not programs[member].by_member
        before = local if fused else [value(member, level - 1)]
        below = sum(peer < member for peer in step.peers) if programs[member].by_member else 0
        return fold(dtype, how, size, [*received[:below], *before, *received[below:]], wide=wide and not final)

    results = [value(member, len(plans[member].levels)) for member in range(len(members))]
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    return results[0]


def _level_sent(plan: BlockPlan, step: int, receiver: int) -> int:
    return next(send.level for send in plan.sends if send.step == step and send.peer == receiver)
