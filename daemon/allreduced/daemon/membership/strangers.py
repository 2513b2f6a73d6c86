"""Ranks of one group that gave different job secrets: they never meet, and those that are wrong are to be told so.

An agent cannot know which secret is the right one. So nobody is refused on the word of a few: a claim is refused where
more ranks of its group gave one other secret, for as long as ``grace`` seconds side by side with it. Where both sides
have as many, the one with the lowest rank stays. The side that stays is not touched: it forms, and runs, as if the
other one did not exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from allreduced.core.identity import GroupKey
from allreduced.daemon.membership.gathering import Claim, Gathering, Scope
from allreduced.daemon.membership.instance import State
from allreduced.daemon.membership.scene import Scene


@dataclass(frozen=True, slots=True)
class Side:
    """The ranks of one group, waiting or running, that gave one secret. ``since``: when the first became known here."""

    proof: bytes
    ranks: frozenset[int]
    since: float

    def place(self) -> tuple[int, int]:
        """Return what decides between two sides; the lower one stays."""
        return (-len(self.ranks), min(self.ranks, default=0))


class Strange(NamedTuple):
    """A claim that is to be refused at ``due``, where it still waits beside ``other`` then."""

    due: float
    gathering: Gathering
    claim: Claim
    other: Side


def strangers(gatherings: Mapping[Scope, Gathering], scene: Scene) -> list[Strange]:
    """Return the claims that are to be refused for their job secret.

    Each agent refuses those of its own clients, and the member with rank 0 of a group that runs those of others.
    """
    found = []
    for key, all_sides in sides(gatherings, scene).items():
        for side in all_sides if len(all_sides) > 1 else ():
            other = strongest(all_sides, side.proof)
            gathering = gatherings.get(Scope(key, side.proof))
            if other is None or gathering is None:
                continue
            scope = Scope(key, other.proof)
            leads = any(
                one.scope == scope and one.state is State.RUNNING and one.mine == 0 for one in scene.instances.values()
            )
            for claim in gathering:
                if (claim.local or leads) and not claim.group:
                    due = max(claim.since, other.since) + scene.timing.failure_timeout
                    found.append(Strange(due, gathering, claim, other))
    return found


def sides(gatherings: Mapping[Scope, Gathering], scene: Scene) -> dict[GroupKey, list[Side]]:
    """Return, of every group with claims that wait, who waits or runs with which job secret."""
    found: dict[GroupKey, list[Side]] = {}
    for scope, gathering in gatherings.items():
        claims = list(gathering)
        if claims:
            ranks = frozenset(claim.rank for claim in claims)
            found.setdefault(scope.key, []).append(Side(scope.proof, ranks, min(claim.since for claim in claims)))
    for instance in scene.instances.values():
        if instance.state is State.RUNNING and instance.form.key in found:
            ranks = frozenset(range(len(instance.form.clients)))
            found[instance.form.key].append(Side(instance.form.proof, ranks, instance.since))
    return {key: _merged(one) for key, one in found.items()}


def strongest(all_sides: Sequence[Side], proof: bytes) -> Side | None:
    """Return the side that the ranks with ``proof`` give way to; None where they stay, or nobody can tell."""
    mine = next((side for side in all_sides if side.proof == proof), None)
    if mine is None:
        return None
    other = min((side for side in all_sides if side.proof != proof), key=Side.place, default=None)
    return other if other is not None and other.place() < mine.place() else None


def _merged(all_sides: Iterable[Side]) -> list[Side]:
    """Return one side for each secret: those that wait and those that run belong together."""
    found: dict[bytes, Side] = {}
    for side in all_sides:
        known = found.get(side.proof)
        if known is not None:
            side = Side(side.proof, known.ranks | side.ranks, min(known.since, side.since))
        found[side.proof] = side
    return list(found.values())
