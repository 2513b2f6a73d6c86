"""Schedules that the engine and the verifier are tested with although no operation selects them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allreduced.schedules.schedule import Move, Row, Schedule, from_rows


def ring(members: int) -> Schedule:
    """Return a ring: reduce-scatter and all-gather, each of ``members - 1`` steps."""
    return from_rows("ring", members, members, _ring(members))


def ring_traffic(member: int, sizes: Sequence[int]) -> int:
    """Everyone passes on every block but one, twice."""
    members = len(sizes)
    return 2 * sum(sizes) - sizes[(member + 1) % members] - sizes[(member + 2) % members] if members > 1 else 0


def _ring(members: int) -> Iterator[Row]:
    last = members - 2
    for member in range(members):
        following, previous = (member + 1) % members, (member - 1) % members
        for step in range(members - 1):
            yield Row(member, (member - step) % members, step, Move.SEND, following, False)
            yield Row(member, (member - step - 1) % members, step, Move.RECV_REDUCE, previous, step == last)
            gather = step + members - 1
            yield Row(member, (member + 1 - step) % members, gather, Move.SEND, following, False)
            yield Row(member, (member - step) % members, gather, Move.RECV_COPY, previous, True)


def doubling(members: int) -> Schedule:
    """Return recursive doubling (powers of two): in each step both of a pair send and reduce the same block."""
    rows = []
    step, distance = 0, 1
    while distance < members:
        for member in range(members):
            rows.append(Row(member, 0, step, Move.SEND, member ^ distance, False))
            rows.append(Row(member, 0, step, Move.RECV_REDUCE, member ^ distance, 2 * distance == members))
        step, distance = step + 1, 2 * distance
    return from_rows("doubling", members, 1, rows)


def doubling_traffic(member: int, members: int, sizes: Sequence[int]) -> int:
    """Everyone sends the tensor once per step."""
    del member
    return (members.bit_length() - 1) * sizes[0]
