"""Which schedule an operation runs: a pure function of what all members know, so that all choose the same."""

from __future__ import annotations

from functools import lru_cache

from allreduced.core.errors import InvalidArgument
from allreduced.schedules.broadcast import direct_broadcast
from allreduced.schedules.direct import direct
from allreduced.schedules.schedule import Schedule

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("direct",),
    "all_reduce_many": ("direct",),
    "broadcast": ("direct",),
    "barrier": ("direct",),
}
"""The algorithms that each kind of operation can run, the usual choice first."""


def select(kind: str, algorithm: str, members: int, nbytes: int) -> str:
    """Return the algorithm that ``kind`` runs where the caller asked for ``algorithm`` (empty: no wish).

    ``nbytes`` is the size of the tensor. All of these are the same on all members, and so is the answer.

    :raises InvalidArgument: the kind is unknown, or has no such algorithm; the message lists what there is.
    """
    del members, nbytes
    known = ALGORITHMS.get(kind)
    if known is None:
        raise InvalidArgument(f"kind of operation {kind!r} is not supported; there are {', '.join(ALGORITHMS)}")
    if not algorithm:
        return known[0]
    if algorithm not in known:
        raise InvalidArgument(
            f"algorithm {algorithm!r} is not supported for {kind}; there are {', '.join(known)}",
            hint="leave algorithm empty and the agent chooses",
        )
    return algorithm


@lru_cache(maxsize=256)
def schedule_for(kind: str, algorithm: str, members: int, root: int) -> Schedule:
    """Return the schedule of an algorithm that :func:`select` returned.

    ``root`` is the *member* that holds the root of a broadcast, and -1 for kinds that have none.
    """
    del algorithm  # one algorithm per kind so far
    return direct_broadcast(members, root) if kind == "broadcast" else direct(members)
