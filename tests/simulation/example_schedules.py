"""Schedules that the engine and the verifier are tested with although no operation selects them."""

from __future__ import annotations

from collections.abc import Sequence

from allreduced.schedules.schedule import Move, Row, Schedule, Traffic, from_rows


def doubling(members: int) -> Schedule:
    """Return recursive doubling (powers of two): in each step both of a pair send and reduce the same block."""
    rows = []
    step, distance = 0, 1
    while distance < members:
        for member in range(members):
            rows.append(Row(member, 0, step, Move.SEND, member ^ distance, False))
            rows.append(Row(member, 0, step, Move.RECV_REDUCE, member ^ distance, 2 * distance == members))
        step, distance = step + 1, 2 * distance
    return from_rows("doubling", members, 1, rows, wide=True)


def doubling_traffic(member: int, members: int, sizes: Sequence[int]) -> Traffic:
    """Everyone sends the tensor once per step."""
    del member
    return Traffic((members.bit_length() - 1) * sizes[0], 0)
