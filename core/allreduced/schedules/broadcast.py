"""Broadcasts: the root's member has the tensor, everyone else gets it. One block; nothing is reduced or rounded.

``direct``: the root's member sends the whole tensor to every other member, in one step. It sends ``members - 1`` times
the tensor, the others send nothing.

``chain``: the members stand in a row that begins with the root's, in their order; each passes the tensor on tile by
tile. ``members - 1`` steps; every member but the last in the row sends the tensor once. A large tensor takes about the
time of its bytes once, and that of a tile for each further member.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allreduced.schedules.schedule import Move, Row, Schedule, Traffic, from_rows


def direct_broadcast(members: int, root: int) -> Schedule:
    """Return the schedule for ``members`` (at least 1); ``root`` is the member that has the tensor."""
    return from_rows("direct", members, 1, _direct(members, root))


def direct_broadcast_traffic(member: int, members: int, root: int, sizes: Sequence[int]) -> Traffic:
    """Return what ``member`` sends, for one block of ``sizes[0]`` elements."""
    return Traffic(0, (members - 1) * sizes[0] if member == root else 0)


def chain_broadcast(members: int, root: int) -> Schedule:
    """Return the schedule for ``members`` (at least 1); ``root`` is the member that has the tensor."""
    return from_rows("chain", members, 1, _chain(members, root))


def chain_broadcast_traffic(member: int, members: int, root: int, sizes: Sequence[int]) -> Traffic:
    """Return what ``member`` sends, for one block of ``sizes[0]`` elements."""
    return Traffic(0, 0 if (member + 1) % members == root else sizes[0])


def _direct(members: int, root: int) -> Iterator[Row]:
    for other in range(members):
        if other != root:
            yield Row(root, 0, 0, Move.SEND, other, False)
            yield Row(other, 0, 0, Move.RECV_COPY, root, True)


def _chain(members: int, root: int) -> Iterator[Row]:
    for step in range(members - 1):
        sender, receiver = (root + step) % members, (root + step + 1) % members
        yield Row(sender, 0, step, Move.SEND, receiver, False)
        yield Row(receiver, 0, step, Move.RECV_COPY, sender, True)
