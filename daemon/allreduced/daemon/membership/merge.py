"""What a change says, as a pure function of the promises of those who take part in it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from allreduced.core.errors import PeerLost
from allreduced.core.identity import Member
from allreduced.daemon.losses import bounded, brief
from allreduced.daemon.membership import wording
from allreduced.protocol.change import (
    MAX_FAILURES,
    MAX_RESULT_NAMES,
    MAX_RESULTS,
    Change,
    Failure,
    Loss,
    Promise,
    Result,
)

MAX_HOLDERS = 8
"""Members that a change names at most as holders of one result."""


class Policy(enum.Enum):
    """What becomes of a group that lost a rank or a node."""

    FAIL = "fail"
    """Operations that are not settled end with the loss, and so do all further calls."""


_ENDING = frozenset({Policy.FAIL})
"""Policies under which a loss ends the group."""


def merge(
    generation: int,
    members: Sequence[Member],
    promises: Mapping[int, Promise],
    *,
    policy: Policy = Policy.FAIL,
    ended: bool = False,
    earlier: Sequence[Loss] = (),
) -> Change:
    """Return the change that ends ``generation``.

    ``members``: those of it; ``promises``: by place, of all that can still be reached; they must be a quorum.
    ``ended``: the group runs nothing more already, for the ``earlier`` losses.
    """
    going = _going(members, promises)
    losses = [*earlier, *_lost_nodes(members, promises, going), *_lost_ranks(members, promises, going)]
    lost = {rank for loss in losses for rank in loss.ranks}
    results, results_fit = _results(promises, going)
    failures, failures_fit = _failures(promises, {(result.name, result.use) for result in results})
    last_round = max((promise.round for promise in promises.values()), default=0)
    return Change(
        generation=generation + 1,
        members=tuple(
            Member(
                members[place].node,
                members[place].incarnation,
                tuple(rank for rank in members[place].ranks if rank not in lost),
            )
            for place in going
        ),
        losses=bounded(losses),
        ended=ended or (policy in _ENDING and bool(losses)) or not (results_fit and failures_fit),
        left=tuple(sorted({rank for promise in promises.values() for rank in promise.left})),
        results=results,
        failures=failures,
        round=last_round,
        refused=next(
            (promises[place].refused for place in sorted(promises) if promises[place].round == last_round), ()
        ),
    )


def sound(change: Change, generation: int, members: Sequence[Member]) -> bool:
    """Tell whether a change can be one of ``generation``: it adds nobody, and names no places that there are not."""
    ranks = {(member.node, member.incarnation): set(member.ranks) for member in members}
    return (
        change.generation == generation + 1
        and bool(change.members)
        and len({member.node for member in change.members}) == len(change.members)
        and all(set(member.ranks) <= ranks.get((member.node, member.incarnation), set()) for member in change.members)
        and all((member.node, member.incarnation) in ranks for member in change.members)
        and all(place < len(members) for result in change.results for place in result.holders)
    )


def _going(members: Sequence[Member], promises: Mapping[int, Promise]) -> list[int]:
    """Return the places of those that go on: they promised, and all of them reach each other.

    A member that is proven dead, or says so itself, never goes on. Of two that promised but cannot reach each other the
    one with the higher place does not.
    """
    places = {member.node: place for place, member in enumerate(members)}
    going = set(promises)
    apart: list[tuple[int, int]] = []
    for place in sorted(promises):
        for loss in promises[place].losses:
            other = places.get(loss.node)
            if other is None or not loss.whole:
                continue
            if loss.proven:
                going.discard(other)
            elif other != place:
                apart.append((min(place, other), max(place, other)))
    for low, high in sorted(apart):
        if low in going:
            going.discard(high)
    return sorted(going)


def _lost_nodes(members: Sequence[Member], promises: Mapping[int, Promise], going: Sequence[int]) -> list[Loss]:
    """Return a loss for every member that does not go on; a proof counts more than silence, then the lowest witness."""
    losses = []
    for place, member in enumerate(members):
        if place in going:
            continue
        told = [
            loss
            for witness in sorted(promises)
            for loss in promises[witness].losses
            if loss.whole and loss.node == member.node
        ]
        best = next((loss for loss in told if loss.proven), told[0] if told else None)
        if best is not None:
            error = best.error
        else:
            own = promises[place].losses if place in promises else ()
            unheard = [loss.node for loss in own if loss.whole and not loss.proven and loss.node != member.node]
            error = brief(_unexplained(member, unheard))
        losses.append(Loss(member.node, member.ranks, whole=True, proven=best is not None and best.proven, error=error))
    return losses


def _unexplained(member: Member, unheard: Sequence[str]) -> PeerLost:
    """Return the error for a member of which no other one says why it does not go on."""
    if unheard:
        return wording.apart(member.node, unheard, member.ranks)
    return wording.peer_lost(member.node, member.ranks, None)


def _lost_ranks(members: Sequence[Member], promises: Mapping[int, Promise], going: Sequence[int]) -> list[Loss]:
    """Return the lost ranks of members that go on; only their own agent knows of them."""
    return [
        loss
        for place in going
        for loss in promises[place].losses
        if not loss.whole and loss.node == members[place].node and set(loss.ranks) <= set(members[place].ranks)
    ]


def _results(promises: Mapping[int, Promise], going: Sequence[int]) -> tuple[tuple[Result, ...], bool]:
    """Return the results that a member has that goes on, and whether all of them could be told."""
    alive = set(going)
    holders: dict[tuple[str, int], set[int]] = {}
    for promise in promises.values():
        for result in promise.results:
            holders.setdefault((result.name, result.use), set()).update(result.holders)
    results = [
        Result(name, use, tuple(sorted(held))[:MAX_HOLDERS])
        for (name, use), places in sorted(holders.items())
        if (held := places & alive)
    ]
    room, fit = MAX_RESULT_NAMES, []
    for result in results[:MAX_RESULTS]:
        room -= len(result.name.encode())
        if room < 0:
            break
        fit.append(result)
    return tuple(fit), len(fit) == len(results)


def _failures(promises: Mapping[int, Promise], results: set[tuple[str, int]]) -> tuple[tuple[Failure, ...], bool]:
    """Return the operations that failed, with the error that the lowest member tells, and whether all could be told."""
    failures: dict[tuple[str, int], Failure] = {}
    for place in sorted(promises):
        for failure in promises[place].failures:
            if (failure.name, failure.use) not in results:
                failures.setdefault((failure.name, failure.use), failure)
    kept = [failures[key] for key in sorted(failures)]
    return tuple(kept[:MAX_FAILURES]), len(kept) <= MAX_FAILURES
