"""Proposals of groups: how claims become one, and what a good one is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from allreduced.core.identity import Member
from allreduced.daemon.membership.gathering import Claim, Gathering, Scope
from allreduced.protocol.peer import Form

_FIRST = 1
"""The generation that a group begins with."""


def proposal(
    scope: Scope, group: int, tile_bytes: int, claims: Sequence[Claim], incarnations: Mapping[str, int]
) -> Form:
    """Return the proposal of a group with these claims, one per rank, by rank. ``incarnations``: of their nodes."""
    ranks: dict[str, list[int]] = {}
    for claim in claims:
        ranks.setdefault(claim.node, []).append(claim.rank)
    return Form(
        key=scope.key,
        proof=scope.proof,
        group=group,
        generation=_FIRST,
        tile_bytes=tile_bytes,
        # Ranks come in order, so nodes come in the order of their lowest rank.
        members=tuple(Member(node, incarnations[node], tuple(held)) for node, held in ranks.items()),
        clients=tuple(claim.number for claim in claims),
    )


def claims_in(form: Form, member: Member, gathering: Gathering) -> dict[int, Claim]:
    """Return the claims of a member that the proposal names and that still wait, by rank."""
    found: dict[int, Claim] = {}
    for rank in member.ranks:
        claim = gathering.get(member.node, form.clients[rank])
        if claim is not None and claim.rank == rank and claim.size == len(form.clients):
            found[rank] = claim
    return found


def well_formed(form: Form) -> bool:
    """Tell whether a proposal is consistent in itself.

    The members' ranks must partition ``0 … size-1``, members come in the order of their lowest rank, each node once.
    """
    members = form.members
    if form.group <= 0 or form.generation <= 0 or form.tile_bytes <= 0 or not members:
        return False
    if any(not member.ranks or list(member.ranks) != sorted(set(member.ranks)) for member in members):
        return False
    if len({member.node for member in members}) != len(members):
        return False
    if [member.ranks[0] for member in members] != sorted(member.ranks[0] for member in members):
        return False
    ranks = sorted(rank for member in members for rank in member.ranks)
    return ranks == list(range(len(form.clients)))
