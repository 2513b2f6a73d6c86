"""``direct`` all-reduce: everyone sends block *i* to its owner, the owner reduces and sends the result back.

Two steps, whatever the number of members, and a single reducing hop: a 16-bit float is rounded once when a node's sum
leaves its node and once when the value is final. A member ``m`` sends its part of every block but its own, and its own
finished block to every other member: for blocks of ``sizes`` elements ``sum(sizes) - sizes[m] + (members - 1) *
sizes[m]`` elements. With equal blocks that is ``2 (members - 1) / members`` of the tensor, the least that an all-reduce
can do.

The owner's local inputs come first, in the same pass over memory as the received values, so the order in which the
nodes' values are added differs from block to block. ``canonical`` moves the same bytes and gives every element the same
order: nodes ascending, and the ranks of a node before that. Its owner reduces its local inputs first, if there are
several, which is one more pass over its block.

The pattern is the "direct" all-to-all exchange of MPI implementations, for example the reduce-scatter by pairwise
exchange in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, with
all exchanges at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allreduced.schedules.schedule import Move, Row, Schedule, Traffic, from_rows


def direct(members: int) -> Schedule:
    """Return the schedule for ``members`` (at least 1); block ``i`` belongs to member ``i``."""
    return from_rows("direct", members, members, _rows(members))


def canonical(members: int) -> Schedule:
    """Return the rows of :func:`direct` with the order of reduction that does not depend on the block."""
    return from_rows("canonical", members, members, _rows(members), by_member=True)


def direct_traffic(member: int, sizes: Sequence[int]) -> Traffic:
    """Return what ``member`` sends, for blocks of ``sizes`` elements, one per member."""
    return Traffic(sum(sizes) - sizes[member], (len(sizes) - 1) * sizes[member])


def _rows(members: int) -> Iterator[Row]:
    for owner in range(members):
        for other in range(members):
            if other != owner:
                yield Row(other, owner, 0, Move.SEND, owner, False)
                yield Row(owner, owner, 0, Move.RECV_REDUCE, other, True)
                yield Row(owner, owner, 1, Move.SEND, other, False)
                yield Row(other, owner, 1, Move.RECV_COPY, owner, True)
