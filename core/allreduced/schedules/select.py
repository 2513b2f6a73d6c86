"""Which schedule an operation runs: a pure function of what all members know, so that all choose the same.

``docs/algorithms.md`` explains the thresholds. They are constants: a measurement on one member would have to be agreed
on with the others first, and results would change from run to run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from allreduced.core.errors import InvalidArgument
from allreduced.schedules.broadcast import chain_broadcast, direct_broadcast
from allreduced.schedules.direct import canonical, direct
from allreduced.schedules.ring import ring
from allreduced.schedules.schedule import Schedule

MIB = 1 << 20


class Choice(NamedTuple):
    """A row of the table: the algorithm is chosen from so many members and so many bytes of the tensor on.

    ``narrow`` says whether it is also chosen for types whose partial values are wider than the tensor's elements.
    """

    algorithm: str
    members: int
    nbytes: int
    narrow: bool


_REDUCING = (Choice("ring", 32, 64 * MIB, False), Choice("direct", 1, 0, True))

TABLE: dict[str, tuple[Choice, ...]] = {
    "all_reduce": _REDUCING,
    "all_reduce_many": _REDUCING,
    "broadcast": (Choice("chain", 3, 4 * MIB, True), Choice("direct", 1, 0, True)),
    "barrier": (Choice("direct", 1, 0, True),),
}
"""By kind of operation: the first row that holds is chosen where the caller asks for no algorithm."""

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("direct", "ring", "canonical"),
    "all_reduce_many": ("direct", "ring", "canonical"),
    "broadcast": ("direct", "chain"),
    "barrier": ("direct",),
}
"""The algorithms that each kind of operation can run."""


def select(kind: str, algorithm: str, members: int, nbytes: int, *, narrow: bool = False) -> str:
    """Return the algorithm that ``kind`` runs where the caller asked for ``algorithm`` (empty: no wish).

    ``nbytes`` is the size of the tensor; ``narrow``: partial values would be wider than its elements. All of these are
    the same on all members, and so is the answer.

    :raises InvalidArgument: the kind is unknown, or has no such algorithm; the message lists what there is.
    """
    known = ALGORITHMS.get(kind)
    if known is None:
        raise InvalidArgument(f"kind of operation {kind!r} is not supported; there are {', '.join(ALGORITHMS)}")
    if not algorithm:
        return next(
            choice.algorithm
            for choice in TABLE[kind]
            if members >= choice.members and nbytes >= choice.nbytes and (choice.narrow or not narrow)
        )
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
    if kind == "broadcast":
        return (chain_broadcast if algorithm == "chain" else direct_broadcast)(members, root)
    return {"direct": direct, "ring": ring, "canonical": canonical}[algorithm](members)
