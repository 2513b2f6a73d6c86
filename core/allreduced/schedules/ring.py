"""``ring`` all-reduce: every block travels around the ring twice, first to be reduced, then to be copied.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009. A member
receives only from the one before it and sends only to the one behind it, the members in their order (by lowest rank).
``2 (members - 1)`` steps: in ``members - 1`` steps of reduce-scatter block ``b`` starts at member ``b + 1`` and every
member on the way adds its local inputs, until member ``b`` has the final value; in ``members - 1`` steps of all-gather
that value is passed on until everyone has it. The engine runs the steps tile by tile, so all blocks and steps overlap
and a large tensor takes about the time of its bytes, but a small one takes the latency of all steps.

A member ``m`` sends every block but its own as a partial value and every block but ``m + 1`` as a final one: for
blocks of ``sizes`` elements ``sum(sizes) - sizes[m]`` and ``sum(sizes) - sizes[(m + 1) % members]`` elements.
With equal blocks that is ``2 (members - 1) / members`` of the tensor, the same as ``direct``.

Partial values of 16-bit floats travel as float32 where the reduction rounds, so a value is rounded to 16 bits once, at
the end; the first half of the bytes is then twice as much. Order of reduction of block ``b``: ``L(b) + (L(b - 1) + (…
+ (L(b + 2) + L(b + 1))))`` around the ring, where each ``L(m)`` stands for the inputs of member ``m``'s ranks,
ascending, which are added before the value that comes from the member before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allreduced.schedules.schedule import Move, Row, Schedule, Traffic, from_rows


def ring(members: int) -> Schedule:
    """Return the schedule for ``members`` (at least 1); block ``i`` becomes final at member ``i``."""
    return from_rows("ring", members, members, _rows(members), wide=True)


def ring_traffic(member: int, sizes: Sequence[int]) -> Traffic:
    """Return what ``member`` sends, for blocks of ``sizes`` elements, one per member."""
    if len(sizes) == 1:
        return Traffic(0, 0)
    return Traffic(sum(sizes) - sizes[member], sum(sizes) - sizes[(member + 1) % len(sizes)])


def _rows(members: int) -> Iterator[Row]:
    for member in range(members):
        following, previous = (member + 1) % members, (member - 1) % members
        for step in range(members - 1):
            yield Row(member, (member - step - 1) % members, step, Move.SEND, following, False)
            last = step == members - 2
            yield Row(member, (member - step - 2) % members, step, Move.RECV_REDUCE, previous, last)
            gather = step + members - 1
            yield Row(member, (member - step) % members, gather, Move.SEND, following, False)
            yield Row(member, (member - step - 1) % members, gather, Move.RECV_COPY, previous, True)
