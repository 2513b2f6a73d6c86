"""``direct`` all-reduce: everyone sends block *i* to its owner, the owner reduces and sends the result back.

Two steps, whatever the number of members, and a single reducing hop: a value is rounded once. A member ``m`` sends its
part of every block but its own, and its own finished block to every other member: for blocks of ``sizes`` elements
``sum(sizes) - sizes[m] + (members - 1) * sizes[m]`` elements. With equal blocks that is ``2 (members - 1) / members``
of the tensor, the least that an all-reduce can do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allreduced.schedules.schedule import Move, Row, Schedule, from_rows


def direct(members: int) -> Schedule:
    """Return the schedule for ``members`` (at least 1); block ``i`` belongs to member ``i``."""
    return from_rows("direct", members, members, _rows(members))


def direct_traffic(member: int, sizes: Sequence[int]) -> int:
    """Return the elements that ``member`` sends, for blocks of ``sizes`` elements, one per member."""
    return sum(sizes) - sizes[member] + (len(sizes) - 1) * sizes[member]


def _rows(members: int) -> Iterator[Row]:
    for owner in range(members):
        for other in range(members):
            if other != owner:
                yield Row(other, owner, 0, Move.SEND, owner, False)
                yield Row(owner, owner, 0, Move.RECV_REDUCE, other, True)
                yield Row(owner, owner, 1, Move.SEND, other, False)
                yield Row(other, owner, 1, Move.RECV_COPY, owner, True)
