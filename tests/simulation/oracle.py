"""What a schedule must give, by the documented order of reduction and without tiles, time or messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from tests.simulation.kernels import fold

from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.program import BlockPlan, compile_program
from allreduced.schedules.schedule import Schedule, block_bounds


def expected(
    schedule: Schedule,
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
        pieces.append(_block(programs, block, span, reduction, size, inputs, members))
    return np.concatenate(pieces)


def _block(
    programs: Sequence[Sequence[BlockPlan]],
    block: int,
    span: slice,
    reduction: Reduction,
    size: int,
    inputs: Mapping[int, npt.NDArray[np.generic]],
    members: Sequence[Sequence[int]],
) -> npt.NDArray[np.generic]:
    """Return what every member ends with for one block; fails if they differ."""
    partial = Reduction.SUM if reduction is Reduction.MEAN else reduction

    @cache
    def value(member: int, level: int) -> npt.NDArray[np.generic]:
        plan = programs[member][block]
        final = not plan.levels if level == 0 else plan.levels[level - 1].final
        how = reduction if final else partial
        local = [inputs[rank][span] for rank in members[member] if rank in inputs]
        if level == 0:
            return fold(how, size, local)
        step = plan.levels[level - 1]
        received = [value(peer, _level_sent(programs[peer][block], step.step, member)) for peer in step.peers]
        if step.copy:
            return received[0]
        before = local if level == 1 else [value(member, level - 1)]
        return fold(how, size, [*before, *received])

    results = [value(member, len(programs[member][block].levels)) for member in range(len(members))]
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    return results[0]


def _level_sent(plan: BlockPlan, step: int, receiver: int) -> int:
    return next(send.level for send in plan.sends if send.step == step and send.peer == receiver)
