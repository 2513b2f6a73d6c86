"""The ranks that have come for one group so far, from this node and from others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from allreduced.core.errors import AllReducedError
from allreduced.core.identity import GroupKey
from allreduced.protocol.peer import Announce


@dataclass(slots=True)
class Claim:
    """One process's claim to a rank. ``client`` and ``request`` are set where it is a client of this node.

    ``group`` is the proposal that the claim is bound to, 0 while it is free. ``since``: when it became known here.
    ``deadline_at`` matters for local claims. ``proof``: of the job secret.
    """

    number: int
    node: str
    size: int
    rank: int
    local_rank: int
    pid: int
    client: int = -1
    request: int = -1
    since: float = 0.0
    deadline_at: float = inf
    group: int = 0
    proof: bytes = b""

    @property
    def local(self) -> bool:
        """True for a client of this node."""
        return self.client >= 0

    def announced(self, key: GroupKey) -> Announce:
        """Return what other agents are told of it."""
        return Announce(key, self.size, self.rank, self.number, self.pid, self.local_rank, self.proof)

    def holder(self) -> str:
        """Return how errors call the process."""
        return f"process {self.pid} on node {self.node!r}"


class Scope(NamedTuple):
    """Claims that may meet: to ranks of one group, with one job secret (or none)."""

    key: GroupKey
    proof: bytes


class Gathering:
    """All claims of one scope that are known here and not yet served, in the order they became known.

    ``came`` are the ranks that were ever claimed, also by claims that were given up since. ``obstacle`` is why these
    claims did not become a group though every rank had come; None where that is not known, or others have come since.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.key = scope.key
        self.came: set[int] = set()
        self.obstacle: AllReducedError | None = None
        self._claims: dict[tuple[str, int], Claim] = {}

    def __bool__(self) -> bool:
        return bool(self._claims)

    def __iter__(self) -> Iterator[Claim]:
        return iter(tuple(self._claims.values()))

    def add(self, claim: Claim) -> None:
        """Take in a claim; one that is known already stays as it is."""
        if self._claims.setdefault((claim.node, claim.number), claim) is claim:
            self.obstacle = None
        self.came.add(claim.rank)

    def get(self, node: str, number: int) -> Claim | None:
        """Return the claim ``number`` of ``node``, if it is here."""
        return self._claims.get((node, number))

    def remove(self, claim: Claim) -> None:
        """Drop a claim; one that is not here is ignored."""
        self._claims.pop((claim.node, claim.number), None)

    def local(self) -> list[Claim]:
        """Return the claims of this node's clients."""
        return [claim for claim in self._claims.values() if claim.local]

    def free(self) -> list[Claim]:
        """Return the claims that no proposal has bound."""
        return [claim for claim in self._claims.values() if not claim.group]

    def missing(self, size: int) -> list[int]:
        """Return the ranks that never came."""
        return sorted(set(range(size)) - self.came)

    def sizes_differ(self) -> bool:
        """Tell whether two free claims expect different numbers of ranks."""
        return len({claim.size for claim in self.free()}) > 1

    def complete(self) -> list[Claim] | None:
        """Return one free claim per rank, by rank; None while a rank lacks one or has several."""
        free = self.free()
        if not free or len(free) != free[0].size:
            return None
        by_rank = {claim.rank: claim for claim in free}
        if len(by_rank) != len(free):
            return None
        return [by_rank[rank] for rank in sorted(by_rank)]


def sizes_by_rank(claims: Iterable[Claim]) -> dict[int, str]:
    """Return what number of ranks each rank expects, as text."""
    return {claim.rank: str(claim.size) for claim in sorted(claims, key=lambda claim: claim.rank)}
