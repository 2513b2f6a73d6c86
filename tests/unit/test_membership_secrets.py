"""Ranks that give different job secrets never meet; who is wrong is told so, and the others form as if alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.membership_cluster import KEY, Cluster, T

from allreduced.core.errors import AuthenticationError, DeadlineExceeded, MismatchError, RankClaimed
from allreduced.core.identity import GroupKey
from allreduced.daemon.membership.events import ClientGone, TimePassed
from allreduced.daemon.membership.strangers import Side, strongest
from allreduced.protocol.job_secret import digest_of, proof_of

OURS, THEIRS, NONE = b"o" * 32, b"t" * 32, b""


def _pass(cluster: Cluster, seconds: float) -> None:
    cluster.now += seconds
    for name in list(cluster.agents):
        cluster.tell(name, TimePassed())
    cluster.deliver_all()


@pytest.mark.parametrize("other", [THEIRS, NONE])
@pytest.mark.parametrize("first", [True, False])
def test_a_stranger_is_refused_and_the_group_forms_without_it(other: bytes, first: bool) -> None:
    cluster = Cluster("ab")
    came = [cluster.join("b", 1, 3, proof=other)] if first else []
    ours = [cluster.join("a", 0, 3, proof=OURS), cluster.join("a", 2, 3, proof=OURS)]
    [stranger] = came or [cluster.join("b", 1, 3, proof=other)]
    cluster.deliver_all()
    assert stranger not in cluster.agents["b"].rejected
    _pass(cluster, T)
    error = cluster.error("b", stranger)
    assert isinstance(error, AuthenticationError)
    gave = "another job secret" if other else "no job secret"
    assert f"rank 1 of group 'world' of job 'job' gave {gave}, unlike rank(s) 0, 2" in error.message
    assert "ALLREDUCED_JOB_SECRET" in error.hint
    right = cluster.join("b", 1, 3, proof=OURS)
    cluster.deliver_all()
    group = cluster.started("b", right).group
    assert [cluster.started("a", client).group for client in ours] == [group, group]


def test_all_ranks_of_each_side_form_a_group_of_their_own_at_once() -> None:
    cluster = Cluster("ab")
    ours = [cluster.join("a", 0, 2, proof=OURS), cluster.join("b", 1, 2, proof=OURS)]
    theirs = [cluster.join("a", 1, 2, proof=THEIRS), cluster.join("b", 0, 2, proof=THEIRS)]
    cluster.deliver_all()
    groups = [cluster.started(name, client).group for name, client in zip("abab", (*ours, *theirs), strict=True)]
    assert groups[0] == groups[1] != groups[2] == groups[3]


def test_the_same_rank_twice_with_different_secrets_is_no_claim_to_one_rank() -> None:
    cluster = Cluster("ab")
    stranger = cluster.join("a", 0, 2, proof=THEIRS)
    ours = [cluster.join("b", 0, 2, proof=OURS), cluster.join("b", 1, 2, proof=OURS)]
    cluster.deliver_all()
    assert all(client in cluster.agents["b"].admitted for client in ours)
    again = cluster.join("b", 0, 2, proof=OURS)
    assert isinstance(cluster.error("b", again), RankClaimed)
    _pass(cluster, T)
    assert isinstance(cluster.error("a", stranger), AuthenticationError)


def test_another_size_does_not_spoil_the_sizes_of_others() -> None:
    cluster = Cluster("ab")
    ours = cluster.join("a", 0, 2, proof=OURS)
    cluster.join("b", 1, 5, proof=THEIRS)
    cluster.deliver_all()
    assert not cluster.agents["a"].rejected
    wrong = cluster.join("b", 1, 3, proof=OURS)  # with the right secret it does
    cluster.deliver_all()
    assert isinstance(cluster.error("a", ours), MismatchError)
    assert isinstance(cluster.error("b", wrong), MismatchError)


def test_a_stranger_to_a_running_group_is_refused_by_the_agent_that_leads_it() -> None:
    cluster = Cluster("abc")
    ours = {name: cluster.join(name, rank, 2, proof=OURS) for rank, name in enumerate("ab")}
    cluster.deliver_all()
    stranger = cluster.join("c", 1, 2, proof=THEIRS)  # no member is there
    cluster.deliver_all()
    _pass(cluster, T)
    assert isinstance(cluster.error("c", stranger), AuthenticationError)
    assert all(client not in cluster.agents[name].ended for name, client in ours.items())


def test_a_few_cannot_have_many_refused() -> None:
    cluster = Cluster("ab")
    alone = cluster.join("b", 0, 1, proof=THEIRS)  # a group of its own
    assert alone in cluster.agents["b"].admitted
    ours = [cluster.join("a", rank, 3, proof=OURS) for rank in (0, 1)]
    cluster.deliver_all()
    _pass(cluster, 10 * T)
    assert not cluster.agents["a"].rejected
    last = cluster.join("b", 2, 3, proof=OURS)
    cluster.deliver_all()
    assert last in cluster.agents["b"].admitted
    assert all(client in cluster.agents["a"].admitted for client in ours)


def test_of_two_equal_sides_the_one_with_the_lowest_rank_stays() -> None:
    cluster = Cluster("ab")
    second = cluster.join("b", 1, 2, proof=THEIRS)
    first = cluster.join("a", 0, 2, proof=OURS)
    cluster.deliver_all()
    _pass(cluster, T)
    assert isinstance(cluster.error("b", second), AuthenticationError)
    assert first not in cluster.agents["a"].rejected


def test_who_waits_until_the_deadline_is_told_of_ranks_with_another_secret() -> None:
    cluster = Cluster("ab")
    ours = cluster.join("a", 0, 2, proof=OURS, deadline_at=T / 2)
    cluster.join("b", 1, 2, proof=THEIRS)
    cluster.deliver_all()
    _pass(cluster, T / 2)
    error = cluster.error("a", ours)
    assert isinstance(error, DeadlineExceeded)
    assert error.missing == (1,)
    assert "rank(s) 1 gave another one" in error.message


def test_a_stranger_that_leaves_is_forgotten() -> None:
    cluster = Cluster("ab")
    cluster.join("a", 0, 2, proof=OURS)
    stranger = cluster.join("b", 1, 2, proof=THEIRS)
    cluster.deliver_all()
    cluster.tell("b", ClientGone(stranger))
    cluster.deliver_all()
    assert [len(agent.membership.snapshot().gatherings) for agent in cluster.agents.values()] == [1, 1]
    _pass(cluster, T)
    assert not cluster.agents["a"].rejected


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.data())
def test_whatever_strangers_do_the_right_ranks_form_their_group(size: int, data: st.DataObject) -> None:
    cluster = Cluster("abc", data.draw(st.integers(0, 1 << 16)))
    steps = [("ours", rank) for rank in range(size)]
    steps += data.draw(st.lists(st.tuples(st.just("theirs"), st.integers(0, size - 1)), max_size=8))
    order = data.draw(st.permutations(steps))
    ours = {}
    for whose, rank in order:
        name = data.draw(st.sampled_from("abc"))
        if whose == "ours":
            ours[name, rank] = cluster.join(name, rank, size, proof=OURS)
        else:
            proof = data.draw(st.sampled_from([THEIRS, NONE, b"x" * 32]))
            cluster.join(name, rank, data.draw(st.integers(rank + 1, size + 2)), proof=proof)
        if data.draw(st.booleans()):
            cluster.deliver_all()
        cluster.now += data.draw(st.floats(0, T / 20))
    cluster.deliver_all()
    groups = {cluster.started(name, client).group for (name, _), client in ours.items()}
    assert len(groups) == 1


def test_sides_are_judged_by_number_then_by_lowest_rank() -> None:
    one = Side(b"1", frozenset({2, 3}), 0.0)
    two = Side(b"2", frozenset({0}), 0.0)
    three = Side(b"3", frozenset({1}), 0.0)
    assert strongest([one, two, three], b"1") is None
    assert strongest([one, two, three], b"2") is one
    assert strongest([two, three], b"3") is two
    assert strongest([two, three], b"2") is None
    assert strongest([two], b"2") is None
    assert strongest([two], b"9") is None
    twin = Side(b"4", frozenset({0}), 0.0)
    assert strongest([two, twin], b"2") is strongest([two, twin], b"4") is None


def test_proofs_differ_by_secret_job_group_and_user_and_tell_none_of_them() -> None:
    digests = {
        digest_of(secret, job, group)
        for secret in (b"a", b"b")
        for job, group in (("job", "world"), ("jobw", "orld"), ("job", "other"))
    }
    assert len(digests) == 6
    proofs = {proof_of(digest, GroupKey(uid, "job", "world")) for digest in digests for uid in (0, 1000)}
    assert len(proofs) == 12
    assert not proofs & digests
    assert {len(proof) for proof in proofs} == {32}
    assert proof_of(b"", KEY) == b""
    assert digest_of(b"secret", "job", "world").hex() == (
        "d746e342238ae42705ca9e9f5d5f831a4fa79a889b07202040922a07166a2df7"
    )
