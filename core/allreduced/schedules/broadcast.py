"""``direct`` broadcast: the root's member sends the whole tensor to every other member.

One step, one block. The root's member sends ``members - 1`` times the tensor, the others send nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allreduced.schedules.schedule import Move, Row, Schedule, from_rows


def direct_broadcast(members: int, root: int) -> Schedule:
    """Return the schedule for ``members`` (at least 1); ``root`` is the member that has the tensor."""
    return from_rows("direct", members, 1, _rows(members, root))


def direct_broadcast_traffic(member: int, members: int, root: int, sizes: Sequence[int]) -> int:
    """Return the elements that ``member`` sends, for one block of ``sizes[0]`` elements."""
    return (members - 1) * sizes[0] if member == root else 0


def _rows(members: int, root: int) -> Iterator[Row]:
    for other in range(members):
        if other != root:
            yield Row(root, 0, 0, Move.SEND, other, False)
            yield Row(other, 0, 0, Move.RECV_COPY, root, True)
