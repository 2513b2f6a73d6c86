"""Losses and reset links end a generation by one decision; who cannot take part in it is cut off."""

from __future__ import annotations

import pytest
from tests.unit.membership_cluster import Cluster, T, formed, group_of, states, told

from allreduced.core.errors import GroupChanged, PeerLost, RankLost, to_wire
from allreduced.daemon.engine.actions import Frozen as EngineFrozen
from allreduced.daemon.engine.events import (
    Changed,
    Freeze,
    GroupBroken,
    GroupForgotten,
    GroupStarted,
    NodeDeparted,
    RanksLeft,
)
from allreduced.daemon.membership.events import (
    ClientGone,
    ClientLeaving,
    FrameArrived,
    Frozen,
    GiveUp,
)
from allreduced.daemon.timing import derived
from allreduced.protocol.change import Failure, Prepare, Result, Trouble


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("loser", "abc")
def test_a_lost_rank_is_the_same_error_on_every_rank(loser: str, seed: int) -> None:
    cluster, clients = formed("abc", seed)
    group = group_of(cluster, clients)
    cluster.tell(loser, ClientGone(clients[loser]))
    cluster.deliver_all()
    errors = told(cluster, clients)
    assert set(errors) == set("abc") - {loser}
    assert len({str(to_wire(error)) for error in errors.values()}) == 1
    assert len({str(agent.changes(group)) for agent in cluster.agents.values()}) == 1


@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
@pytest.mark.parametrize("seed", range(4))
def test_a_proven_death_is_no_lost_vote(names: str, seed: int) -> None:
    for victim in names:
        cluster, clients = formed(names, seed)
        group = group_of(cluster, clients)
        cluster.kill(victim)
        cluster.deliver_all()
        errors = told(cluster, clients)
        assert set(errors) == set(names) - {victim}
        assert all(isinstance(error, PeerLost) and error.nodes == (victim,) for error in errors.values())
        for agent in cluster.agents.values():
            assert agent.changes(group)[0].change.ended
            assert not any(isinstance(event, GroupBroken) for event in agent.engine)
            assert NodeDeparted(group, victim) in agent.engine


def test_of_two_nodes_the_one_with_the_lowest_rank_goes_on_when_the_other_is_silent() -> None:
    cluster, clients = formed("ab")
    group = group_of(cluster, clients)
    cluster.silence("a", "b")
    cluster.silence("b", "a")
    cluster.deliver_all()
    assert [event.change.members[0].node for event in cluster.agents["a"].changes(group)] == ["a"]
    error = told(cluster, clients)["a"]
    assert isinstance(error, PeerLost)
    assert (error.nodes, error.ranks) == (("b",), (1,))
    cut_off = cluster.agents["b"]
    assert [type(event) for event in cut_off.engine] == [GroupStarted, Freeze, GroupBroken]
    error = told(cluster, clients)["b"]
    assert isinstance(error, PeerLost)
    assert error.nodes == ("a",)
    assert "agent 'b' is cut off" in error.message


def test_a_majority_goes_on_and_the_rest_is_cut_off() -> None:
    cluster, clients = formed("abcde")
    group = group_of(cluster, clients)
    for low in "ab":
        for high in "cde":
            cluster.silence(low, high)
            cluster.silence(high, low)
    cluster.deliver_all()
    for name in "ab":
        assert any(isinstance(event, GroupBroken) for event in cluster.agents[name].engine)
        assert cluster.agents[name].changes(group) == []
    for name in "cde":
        (change,) = cluster.agents[name].changes(group)
        assert [member.node for member in change.change.members] == ["c", "d", "e"]
        assert [(loss.node, loss.proven) for loss in change.change.losses] == [("a", False), ("b", False)]


def test_a_member_that_was_cut_off_hears_of_the_change_when_it_is_back() -> None:
    cluster, clients = formed("abc")
    group = group_of(cluster, clients)
    for other in "bc":
        cluster.silence("a", other)
        cluster.silence(other, "a")
    cluster.deliver_all()
    assert cluster.agents["a"].changes(group) == []
    cluster.link("a", "b")
    cluster.deliver_all()
    assert cluster.agents["a"].changes(group) == cluster.agents["b"].changes(group)
    assert isinstance(cluster.agents["a"].ended[clients["a"]], PeerLost)
    diverged = GroupChanged("results differ", diverged=True)
    cluster.tell("a", GiveUp(group, diverged))
    assert cluster.agents["a"].ended[clients["a"]] is diverged


@pytest.mark.parametrize("seed", range(8))
def test_who_left_while_a_link_was_lost_is_told_behind_the_change(seed: int) -> None:
    cluster, clients = formed("abc", seed)
    group = group_of(cluster, clients)
    cluster.cut("a", "b")
    cluster.tell("b", ClientLeaving(clients["b"], group))
    cluster.link("a", "b")
    cluster.deliver_all()
    events = cluster.agents["a"].engine
    (change,) = cluster.agents["a"].changes(group)
    behind = events[events.index(change) + 1 :]
    assert [type(event) for event in events[: events.index(change)]] == [GroupStarted, Freeze]
    assert behind == ([] if change.change.left else [RanksLeft(group, (1,))])
    assert cluster.agents["a"].ended == {}


def test_of_two_that_cannot_reach_each_other_the_higher_place_is_lost() -> None:
    cluster, clients = formed("abc")
    group = group_of(cluster, clients)
    cluster.silence("b", "c")
    cluster.silence("c", "b")
    cluster.deliver_all()
    for name in "abc":
        (change,) = cluster.agents[name].changes(group)
        assert [member.node for member in change.change.members] == ["a", "b"]
    errors = told(cluster, clients)
    assert all(isinstance(error, PeerLost) and error.nodes == ("c",) for error in errors.values())


@pytest.mark.parametrize("seed", range(8))
def test_a_reset_link_loses_nobody_and_begins_the_next_generation(seed: int) -> None:
    cluster, clients = formed("abc", seed)
    group = group_of(cluster, clients)
    for generation, (one, other) in enumerate([("a", "b"), ("b", "c"), ("a", "c")], 2):
        cluster.cut(one, other)
        cluster.deliver_all()
        cluster.link(one, other)
        cluster.deliver_all()
        assert states(cluster) == {name: [("running", generation)] for name in "abc"}
    assert told(cluster, clients) == {}
    for agent in cluster.agents.values():
        for event in agent.changes(group):
            assert [member.ranks for member in event.change.members] == [(0,), (1,), (2,)]
            assert not event.change.ended


def test_a_link_that_is_down_waits_for_news_and_frames_of_the_next_generation_count_as_lost_too() -> None:
    cluster, clients = formed("abc")
    cluster.cut("a", "b")
    cluster.deliver_all()
    assert states(cluster) == {name: [("running", 1)] for name in "abc"}
    cluster.cut("b", "c")
    cluster.link("b", "c")
    cluster.deliver_all()  # c and b change, but a must promise or die
    cluster.link("a", "b")
    cluster.deliver_all()
    assert {state for (state,) in states(cluster).values()} == {("running", 2)}
    assert told(cluster, clients) == {}


def test_results_and_failures_of_all_that_promise_are_agreed() -> None:
    cluster, clients = formed("abc")
    group = group_of(cluster, clients)
    error = to_wire(RankLost("too late"))
    cluster.agents["a"].frozen[group, 1] = EngineFrozen(group, 1, (Result("x", 0, (0,)),), (), 3, (1,))
    cluster.agents["b"].frozen[group, 1] = EngineFrozen(
        group, 1, (Result("x", 0, (1,)), Result("y", 4, (1,))), (Failure("z", 1, error),), 4, (2,)
    )
    cluster.agents["c"].frozen[group, 1] = EngineFrozen(group, 1, (Result("w", 9, (2,)),), (), 4, (2,))
    cluster.kill("c")
    cluster.deliver_all()
    (changed,) = cluster.agents["a"].changes(group)
    assert changed.change.results == (Result("x", 0, (0, 1)), Result("y", 4, (1,)))
    assert changed.change.failures == (Failure("z", 1, error),)
    assert (changed.change.round, changed.change.refused) == (4, (2,))


def test_a_single_node_changes_by_itself_at_once() -> None:
    cluster = Cluster("a")
    first, second = cluster.join("a", 0, 2), cluster.join("a", 1, 2, pid=8)
    cluster.tell("a", ClientGone(second))
    error = cluster.agents["a"].ended[first]
    assert isinstance(error, RankLost)
    assert "process 8 on node 'a'" in error.message
    assert [type(event) for event in cluster.agents["a"].engine] == [GroupStarted, Freeze, Changed]


@pytest.mark.parametrize("names", ["abc", "abcd"])
@pytest.mark.parametrize("steps", range(30))
def test_a_proposer_that_dies_at_any_step_leaves_one_decision(names: str, steps: int) -> None:
    cluster, clients = formed(names, steps)
    group = group_of(cluster, clients)
    last = names[-1]
    cluster.tell(last, ClientGone(clients[last]))
    for _ in range(steps):
        ready = [pair for pair, queue in cluster.queues.items() if queue]
        if ready:
            cluster.deliver_one(cluster.random.choice(ready))
    cluster.kill("a")
    cluster.pass_time(3 * T)
    changes = {str(agent.changes(group)[0]) for agent in cluster.agents.values()}
    assert len(changes) == 1
    errors = told(cluster, clients)
    assert set(errors) == set(names[1:-1])
    assert len({str(to_wire(error)) for error in errors.values()}) == 1
    assert {error.ranks[-1] for error in errors.values() if isinstance(error, PeerLost | RankLost)} == {len(names) - 1}


def test_whose_part_in_a_change_is_missing_is_told_and_who_is_lost_stays_in_the_list() -> None:
    cluster, clients = formed("abc")
    cluster.agents["b"].asleep = True  # its engine does not freeze
    cluster.tell("c", ClientGone(clients["c"]))
    cluster.deliver_all()
    shown = {name: cluster.agents[name].membership.snapshot().groups for name in "abc"}
    assert [(view.state, view.awaited, view.generation) for view in shown["a"]] == [("changing", ("b",), 1)]
    assert [(view.state, view.awaited) for view in shown["b"]] == [("changing", ("a",))]
    assert shown["c"] == ()  # no client of it is left there
    frozen = EngineFrozen(shown["b"][0].group, 1, (), (), 0, ())
    cluster.tell("b", Frozen(frozen))
    cluster.deliver_all()
    for name in "ab":
        (view,) = cluster.agents[name].membership.snapshot().groups
        assert (view.state, view.awaited, view.generation) == ("broken", (), 2)
        assert [(member.node, member.ranks) for member in view.members] == [("a", (0,)), ("b", (1,)), ("c", (2,))]


def test_a_change_that_cannot_be_decided_is_given_up() -> None:
    cluster, clients = formed("abc")
    group = group_of(cluster, clients)
    for name in "ab":
        cluster.agents[name].asleep = True  # their engines never freeze
    cluster.tell("c", ClientGone(clients["c"]))
    cluster.pass_time(1.4 * T)
    assert told(cluster, clients) == {}
    cluster.pass_time(1.6 * T)
    assert "a" in told(cluster, clients)
    cluster.pass_time(3.1 * T)  # that one of them gave up is news, which the other has patience with
    assert set(told(cluster, clients)) == {"a", "b"}
    (first,) = [event for event in cluster.agents["a"].engine if isinstance(event, GroupBroken)]
    assert first.group == group
    assert "did not agree within 12 s" in first.error.message


def test_a_member_that_gives_up_is_lost_to_the_others() -> None:
    cluster, clients = formed("abc")
    group = group_of(cluster, clients)
    cluster.tell("b", GiveUp(group, PeerLost("a result never came", nodes=("a",))))
    cluster.deliver_all()
    assert isinstance(told(cluster, clients)["b"], PeerLost)
    for name in "ac":
        error = told(cluster, clients)[name]
        assert isinstance(error, PeerLost)
        assert (error.nodes, error.ranks) == (("b",), (1,))
        assert "a result never came" in error.message
    assert cluster.agents["b"].changes(group) == cluster.agents["a"].changes(group)  # so that it can compare


@pytest.mark.parametrize("frame", [Prepare(4711, 1, 1, 0), Trouble(4711, 1, ())])
def test_an_agent_that_forgot_the_group_says_so_to_whoever_takes_it_for_a_member(frame: Prepare | Trouble) -> None:
    cluster, clients = formed("ab")
    (answer,) = cluster.tell("a", FrameArrived("b", frame))
    said = getattr(answer, "frame", None)
    assert isinstance(said, Trouble)
    assert [(loss.node, loss.whole, loss.proven) for loss in said.losses] == [("a", True, True)]
    assert told(cluster, clients) == {}
    # Such an answer is not answered.
    assert cluster.tell("b", FrameArrived("a", said)) == []


def test_claims_of_a_node_that_is_not_admitted_end_when_the_others_go_on_without_it() -> None:
    cluster = Cluster("abc")
    clients = {name: cluster.join(name, rank, 3) for rank, name in enumerate("abc")}
    # Everything but what b sends to c: a and b are admitted, c still waits for the consent of b.
    for _ in range(200):
        ready = [pair for pair, queue in cluster.queues.items() if queue and pair != ("b", "c")]
        if not ready:
            break
        cluster.deliver_one(cluster.random.choice(ready))
    held = len(cluster.queues["b", "c"])
    assert held
    if not cluster.agents["a"].admitted:
        pytest.skip("the announcement of b is held back too")
    cluster.cut("b", "c")
    cluster.link("b", "c")
    cluster.deliver_all()
    for name in "ab":
        assert isinstance(cluster.agents[name].ended[clients[name]], PeerLost)
    assert isinstance(cluster.error("c", clients["c"]), PeerLost)


def test_a_member_that_is_not_admitted_yet_takes_part_in_a_change_once_it_is() -> None:
    cluster = Cluster("abc")
    clients = {name: cluster.join(name, rank, 3) for rank, name in enumerate("abc")}

    def deliver_but(held: tuple[str, str], beyond: int) -> None:
        while True:
            ready = [pair for pair, queue in cluster.queues.items() if len(queue) > (beyond if pair == held else 0)]
            if not ready:
                return
            cluster.deliver_one(ready[0])

    while not any(type(frame).__name__ == "Form" for frame in cluster.queues["b", "c"]):
        cluster.deliver_one(next(pair for pair, queue in cluster.queues.items() if queue))
    deliver_but(("b", "c"), len(cluster.queues["b", "c"]))
    assert clients["a"] in cluster.agents["a"].admitted
    assert clients["c"] not in cluster.agents["c"].admitted
    cluster.tell("a", ClientGone(clients["a"]))
    deliver_but(("b", "c"), len(cluster.queues["b", "c"]))
    assert clients["c"] not in cluster.agents["c"].rejected
    cluster.deliver_all()
    for name in "bc":
        error = cluster.agents[name].ended[clients[name]]
        assert isinstance(error, RankLost)
        assert error.ranks == (0,)


def test_a_node_whose_ranks_left_still_tells_its_results() -> None:
    cluster, clients = formed("ab")
    group = group_of(cluster, clients)
    cluster.agents["b"].frozen[group, 1] = EngineFrozen(group, 1, (Result("last", 0, (1,)),), (), 0, ())
    cluster.tell("b", ClientLeaving(clients["b"], group))
    cluster.cut("a", "b")
    cluster.link("a", "b")
    cluster.deliver_all()
    (changed,) = cluster.agents["a"].changes(group)
    assert changed.change.results == (Result("last", 0, (1,)),)
    assert changed.change.left == (1,)
    assert not changed.change.ended
    cluster.tell("a", ClientLeaving(clients["a"], group))
    cluster.deliver_all()
    assert all(agent.engine[-1] == GroupForgotten(group) for agent in cluster.agents.values())


def test_the_last_words_of_a_departed_member_do_not_count() -> None:
    """Its decision could contradict that of the others, who do without its vote."""
    cluster, clients = formed("abc")
    group = group_of(cluster, clients)
    cluster.tell("c", ClientGone(clients["c"]))
    while not any("Accepted" in str(frame) for frame in cluster.queues["c", "a"]):
        ready = [pair for pair, queue in cluster.queues.items() if queue and "b" not in pair]
        if not ready:
            pytest.fail("no quorum without b")
        cluster.deliver_one(ready[0])
        if not [pair for pair, queue in cluster.queues.items() if queue and "b" not in pair]:
            break
    committed = [frame for frame in cluster.queues["a", "b"] if type(frame).__name__ == "Committed"]
    cluster.kill("a")
    for frame in committed:  # late: b knows already that a is dead
        cluster.tell("b", FrameArrived("a", frame))
    cluster.pass_time(3 * T)
    assert cluster.agents["b"].changes(group)[:1] == cluster.agents["c"].changes(group)[:1]


@pytest.mark.parametrize("seconds", [0.05 * T, 0.15 * T, 0.25 * T, 0.4 * T])
def test_a_change_is_decided_though_answers_take_longer_than_a_turn(seconds: float) -> None:
    """``seconds``: from a frame to its answer."""
    cluster, clients = formed("abc")
    cluster.delay = seconds / 2
    for other in "ab":
        cluster.silence(other, "c")
    cluster.pass_time(cluster.now + derived(T).give_up)
    errors = told(cluster, clients)
    assert set(errors) == {"a", "b"}
    assert len({str(to_wire(error)) for error in errors.values()}) == 1
    assert all(isinstance(error, PeerLost) and error.nodes == ("c",) for error in errors.values())
