"""What a change says follows from the promises alone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from itertools import combinations, product

import pytest

from allreduced.core.errors import GroupChanged, PeerLost, RankLost, to_wire
from allreduced.core.identity import Member
from allreduced.daemon.losses import brief, error_of
from allreduced.daemon.membership.merge import MAX_HOLDERS, merge, sound
from allreduced.daemon.quorum import has_quorum
from allreduced.protocol.change import MAX_FAILURES, Change, Committed, Failure, Loss, Promise, Result
from allreduced.protocol.peer import decode, encode

MEMBERS = (Member("a", 11, (0, 3)), Member("b", 12, (1,)), Member("c", 13, (2,)))


def promise(
    *, losses: Sequence[Loss] = (), results: Sequence[Result] = (), failures: Sequence[Failure] = (), left: int = -1
) -> Promise:
    return Promise(
        1, 4, 1, 0, 0, 0, (), tuple(losses), (left,) if left >= 0 else (), tuple(results), tuple(failures), 0, ()
    )


def silent(node: str) -> Loss:
    ranks = next(member.ranks for member in MEMBERS if member.node == node)
    return Loss(node, ranks, whole=True, proven=False, error=("peer_lost", f"{node} was silent", "", {}))


def dead(node: str, why: str = "is gone") -> Loss:
    ranks = next(member.ranks for member in MEMBERS if member.node == node)
    return Loss(node, ranks, whole=True, proven=True, error=("peer_lost", f"{node} {why}", "", {}))


def nodes(change: Change) -> list[str]:
    return [member.node for member in change.members]


def test_with_no_losses_all_go_on_with_all_their_ranks() -> None:
    change = merge(4, MEMBERS, {0: promise(), 1: promise(left=1), 2: promise()})
    assert change == Change(5, MEMBERS, (), ended=False, left=(1,), results=(), failures=(), round=0, refused=())


def test_a_lost_rank_is_told_by_its_own_agent_only() -> None:
    own = Loss("a", (3,), whole=False, proven=True, error=("rank_lost", "rank 3 ended", "", {}))
    other = Loss("b", (1,), whole=False, proven=True, error=("rank_lost", "so they say", "", {}))
    change = merge(4, MEMBERS, {0: promise(losses=[own, other]), 1: promise(), 2: promise()})
    assert change.losses == (own,)
    assert change.members[0] == Member("a", 11, (0,))
    assert change.ended


def test_a_proof_counts_more_than_silence_and_than_a_promise() -> None:
    promises = {0: promise(losses=[silent("c")]), 1: promise(losses=[dead("c")]), 2: promise()}
    change = merge(4, MEMBERS, promises)
    assert nodes(change) == ["a", "b"]
    assert change.losses == (dead("c"),)


def test_members_that_nobody_can_reach_are_lost_as_the_lowest_witness_says() -> None:
    change = merge(4, MEMBERS, {0: promise(losses=[silent("c")]), 1: promise(losses=[silent("c")])})
    assert nodes(change) == ["a", "b"]
    assert change.losses == (silent("c"),)


@pytest.mark.parametrize("teller", [0, 1, 2])
def test_of_two_that_do_not_reach_each_other_the_lower_place_goes_on(teller: int) -> None:
    others = {0: "c", 1: "c", 2: "b"}
    promises = {place: promise(losses=[silent(others[place])] if place == teller else []) for place in range(3)}
    change = merge(4, MEMBERS, promises)
    assert nodes(change) == ["a", "b"]
    (loss,) = change.losses
    assert (loss.node, loss.whole, loss.proven) == ("c", True, False)
    if teller == 2:  # nobody else says why
        assert loss.error[1].startswith("agent 'c' and agent(s) 'b' do not hear each other, so one side had to go;")


def test_results_name_holders_that_go_on_and_win_over_failures() -> None:
    error = to_wire(RankLost("x"))
    promises = {
        0: promise(results=[Result("x", 1, (0,))], failures=[Failure("y", 0, error), Failure("x", 1, error)]),
        1: promise(results=[Result("x", 1, (1,))], failures=[Failure("y", 0, to_wire(PeerLost("other")))]),
        2: promise(losses=[silent("b")], results=[Result("z", 0, (2,)), Result("x", 1, (2,))]),
    }
    change = merge(4, MEMBERS, promises)
    assert nodes(change) == ["a", "b"]
    assert change.results == (Result("x", 1, (0, 1)),)
    assert change.failures == (Failure("y", 0, error),)


def test_more_failures_than_can_be_told_end_the_group() -> None:
    error = to_wire(RankLost("x"))
    failures = [Failure("x", use, error) for use in range(MAX_FAILURES)]
    assert not merge(4, MEMBERS, {place: promise(failures=failures) for place in range(3)}).ended
    more = promise(failures=[Failure("y", 0, error)])
    change = merge(4, MEMBERS, {0: promise(failures=failures), 1: more, 2: promise()})
    assert change.ended
    assert isinstance(error_of(change.losses), GroupChanged)


def test_a_group_that_ended_stays_so_with_its_losses() -> None:
    change = merge(4, MEMBERS, {place: promise() for place in range(3)}, ended=True, earlier=(dead_before := _gone(),))
    assert change.ended
    assert change.losses == (dead_before,)


def _gone() -> Loss:
    return Loss("z", (9,), whole=True, proven=True, error=brief(PeerLost("z is gone", nodes=("z",), ranks=(9,))))


def test_the_change_of_a_large_group_fits_a_frame() -> None:
    members = [Member(f"node-{place:05}", place, tuple(range(place * 8, place * 8 + 8))) for place in range(2048)]
    text = "agent was silent for 5.0 s after its link ended: " + "why " * 100
    losses = [
        Loss(member.node, member.ranks, whole=True, proven=False, error=("peer_lost", text, text, {}))
        for member in members[1100:]
    ]
    names = [f"layer.{number}.weight" for number in range(4000)]
    promises = {
        place: promise(
            losses=losses if place < 2 else [],
            results=[Result(name, 7, (place,)) for name in names] if place < 2 * MAX_HOLDERS else [],
        )
        for place in range(1100)
    }
    change = merge(4, members, promises)
    frame = Committed(1, 4, change)
    assert decode(encode(frame)) == frame
    assert len(change.members) == 1100
    assert {len(result.holders) for result in change.results} == {MAX_HOLDERS}


@pytest.mark.parametrize("seed", range(20))
def test_the_order_in_which_promises_came_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    losses = [silent("a"), silent("b"), silent("c"), dead("b")]
    given = {place: promise(losses=rng.sample(losses, rng.randrange(3)), left=rng.randrange(4)) for place in range(3)}
    shuffled = dict(rng.sample(list(given.items()), 3))
    change = merge(4, MEMBERS, given)
    assert merge(4, MEMBERS, shuffled) == change
    if change.members:
        assert sound(change, 4, MEMBERS)


def test_changes_that_add_members_or_ranks_are_not_sound() -> None:
    good = merge(4, MEMBERS, {place: promise(results=[Result("x", 0, (place,))]) for place in range(3)})
    assert sound(good, 4, MEMBERS)
    for bad in (
        dataclasses.replace(good, generation=6),
        dataclasses.replace(good, members=()),
        dataclasses.replace(good, members=(*MEMBERS, Member("d", 1, ()))),
        dataclasses.replace(good, members=(*MEMBERS, MEMBERS[0])),
        dataclasses.replace(good, members=(Member("a", 11, (0, 1)),)),
        dataclasses.replace(good, members=(Member("a", 99, (0,)),)),
        dataclasses.replace(good, results=(Result("x", 0, (3,)),)),
    ):
        assert not sound(bad, 4, MEMBERS)


def test_the_error_of_losses_names_all_of_them() -> None:
    rank = Loss("a", (3,), whole=False, proven=True, error=("rank_lost", "rank 3 ended", "", {}))
    error = error_of([rank])
    assert isinstance(error, RankLost)
    assert (error.message, error.ranks, error.nodes) == ("rank 3 ended", (3,), ("a",))
    error = error_of([rank, dead("c"), silent("b")])
    assert isinstance(error, PeerLost)
    assert (error.ranks, error.nodes) == ((1, 2, 3), ("c", "b"))
    assert error.message == "rank 3 ended; c is gone; b was silent"


@pytest.mark.parametrize("members", range(1, 7))
def test_two_quorums_share_a_member_that_lives_or_the_first_lives_no_more(members: int) -> None:
    places = range(members)
    sets = [set(some) for count in range(members + 1) for some in combinations(places, count)]
    for departed, later in product(sets, sets):
        if not departed <= later:
            continue  # who has departed stays so
        quorums = [votes for votes in sets if votes and not votes & departed and has_quorum(members, votes, departed)]
        after = [votes for votes in sets if votes and not votes & later and has_quorum(members, votes, later)]
        for first, second in product(quorums, after):
            assert first & second or first <= later, (first, departed, second, later)
