"""Claims to ranks become groups, or errors that say why not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.membership_cluster import KEY, TILE, Cluster, T, formed

from allreduced.core.errors import (
    DeadlineExceeded,
    InvalidArgument,
    MismatchError,
    PeerLost,
    RankClaimed,
    RankLost,
    WireError,
)
from allreduced.core.identity import Member
from allreduced.daemon.engine.events import GroupForgotten, GroupStarted, NodeDeparted, RanksLeft
from allreduced.daemon.membership.events import ClientGone, ClientLeaving, FrameArrived, PeerUp, TimePassed
from allreduced.protocol.peer import Announce, Broken, Form, Left, MembershipFrame, Refuse, Retract


def test_ranks_of_one_node_form_a_group_without_peers() -> None:
    cluster = Cluster("a")
    first, second = cluster.join("a", 1, 2), cluster.join("a", 0, 2)
    started = cluster.started("a", first)
    assert started == cluster.started("a", second)
    assert started.members == (Member("a", cluster.agents["a"].incarnation, (0, 1)),)
    assert started.local == {0: second, 1: first}
    assert (started.mine, started.generation, started.tile_bytes, started.key) == (0, 1, TILE, KEY)


@pytest.mark.parametrize("seed", range(10))
def test_ranks_gather_over_agents_and_members_come_by_lowest_rank(seed: int) -> None:
    cluster = Cluster("abc", seed)
    ranks = {"a": (3,), "b": (0, 4), "c": (1, 2)}
    clients = {(name, rank): cluster.join(name, rank, 5) for name, held in ranks.items() for rank in held}
    cluster.deliver_all()
    all_started = [cluster.started(name, client) for (name, _), client in clients.items()]
    assert {started.group for started in all_started} == {all_started[0].group}
    for started in all_started:
        assert [(member.node, member.ranks) for member in started.members] == [
            ("b", (0, 4)),
            ("c", (1, 2)),
            ("a", (3,)),
        ]
    assert [cluster.started(name, clients[name, ranks[name][0]]).mine for name in "abc"] == [2, 0, 1]


def test_agents_without_ranks_forget_the_claims_of_a_formed_group() -> None:
    cluster = Cluster("abx")
    cluster.join("a", 0, 2)
    cluster.join("b", 1, 2)
    cluster.deliver_all()
    assert cluster.agents["x"].membership.snapshot().gatherings == ()


def test_a_peer_that_comes_late_hears_of_waiting_claims() -> None:
    cluster = Cluster("ab", connect=False)
    first, second = cluster.join("a", 0, 2), cluster.join("b", 1, 2)
    cluster.link("a", "b")
    cluster.deliver_all()
    assert cluster.started("a", first).group == cluster.started("b", second).group


def test_a_gathering_tells_who_waits_since_when_and_who_did_not_consent() -> None:
    cluster = Cluster("abc", connect=False)
    cluster.link("a", "b")
    cluster.link("a", "c")
    cluster.now = 10.0
    cluster.join("a", 0, 3, pid=70)
    cluster.now = 12.0
    cluster.join("b", 1, 3, pid=71)
    cluster.deliver_all()
    [gathering] = cluster.agents["a"].membership.snapshot().gatherings
    assert (gathering.key, gathering.size, gathering.silent) == (KEY, 3, ())
    assert gathering.ranks == ((0, "a", 70, 10.0), (1, "b", 71, 12.0))
    cluster.join("c", 2, 3)
    cluster.deliver_all()
    silent = {name: agent.membership.snapshot().gatherings[0].silent for name, agent in cluster.agents.items()}
    assert silent == {"a": ("b", "c"), "b": ("c",), "c": ("b",)}  # b and c cannot reach each other
    cluster.link("b", "c")
    cluster.deliver_all()
    [group] = cluster.agents["b"].membership.snapshot().groups
    assert (group.state, group.local, group.generation, group.error) == ("running", ((1, 2, 71),), 1, None)


def test_admission_waits_until_all_members_reach_each_other() -> None:
    cluster = Cluster("abc", connect=False)
    cluster.link("a", "b")
    cluster.link("a", "c")
    clients = {name: cluster.join(name, rank, 3) for rank, name in enumerate("abc")}
    cluster.deliver_all()
    assert not any(agent.admitted for agent in cluster.agents.values())
    cluster.link("b", "c")
    cluster.deliver_all()
    assert len({cluster.started(name, client).group for name, client in clients.items()}) == 1


def test_the_deadline_of_a_proposal_names_the_unreachable_agent() -> None:
    cluster = Cluster("abc", connect=False)
    cluster.link("a", "b")
    cluster.link("a", "c")
    clients = {name: cluster.join(name, rank, 3, deadline_at=10.0) for rank, name in enumerate("abc")}
    cluster.deliver_all()
    cluster.now = 10.0
    for name in "bac":
        cluster.tell(name, TimePassed())
    cluster.deliver_all()
    for name, client in clients.items():
        assert isinstance(cluster.error(name, client), DeadlineExceeded)
    assert "cannot reach c" in str(cluster.error("b", clients["b"]))


@pytest.mark.parametrize("order", ["abc", "bac", "cab", "cba"])
def test_who_gives_up_first_tells_the_others_why_their_group_did_not_form(order: str) -> None:
    cluster = Cluster("abc", connect=False)
    cluster.link("a", "b")
    cluster.link("a", "c")
    clients = {
        name: cluster.join(name, rank, 3, deadline_at=10.0 + order.index(name)) for rank, name in enumerate("abc")
    }
    cluster.deliver_all()
    for name in order:
        cluster.now += 10.0
        cluster.tell(name, TimePassed())
        cluster.deliver_all()
    start = "group 'world' of job 'job' did not form in time, though every rank came; "
    errors = {name: str(cluster.error(name, client)) for name, client in clients.items()}
    assert errors["b"].startswith(f"{start}agent 'b' cannot reach c")
    assert errors["c"].startswith(f"{start}agent 'c' cannot reach b")
    first = order[0]
    if first == "a":
        assert errors["a"].startswith(f"{start}the agents of b, c did not agree")
    else:
        where = f"agent {first!r} cannot reach {'c' if first == 'b' else 'b'}"
        assert f"on node {first!r}) gave up while its group gathered: {where}" in errors["a"]


def test_a_process_that_ended_while_its_group_could_not_form_is_named_with_what_to_look_at() -> None:
    cluster = Cluster("abc", connect=False)
    cluster.link("a", "b")
    cluster.link("a", "c")
    clients = {name: cluster.join(name, rank, 3, deadline_at=30.0, pid=rank) for rank, name in enumerate("abc")}
    cluster.deliver_all()
    cluster.tell("c", ClientGone(clients["c"]))
    cluster.deliver_all()
    cluster.now = 30.0
    cluster.tell("a", TimePassed())
    error = cluster.error("a", clients["a"])
    assert isinstance(error, DeadlineExceeded)
    assert "; rank 2 (process 2 on node 'c') ended while its group gathered" in error.message
    assert error.hint.startswith("look at the output of that process, and whether it was killed; ")
    assert error.hint.endswith("; every agent must reach every other one")


def test_why_a_group_did_not_form_is_no_reason_any_more_once_somebody_else_came() -> None:
    cluster = Cluster("abc", connect=False)
    cluster.link("a", "b")
    cluster.link("a", "c")
    clients = {name: cluster.join(name, rank, 3, deadline_at=30.0) for rank, name in enumerate("ac")}
    cluster.join("b", 2, 3, deadline_at=10.0)
    cluster.deliver_all()
    cluster.now = 10.0
    cluster.tell("b", TimePassed())
    cluster.deliver_all()
    cluster.link("b", "c")
    cluster.tell("a", ClientGone(clients["a"]))
    cluster.join("a", 0, 3, deadline_at=40.0)
    cluster.deliver_all()
    cluster.now = 30.0
    cluster.tell("c", TimePassed())
    assert "did not gather in time" in str(cluster.error("c", clients["c"]))


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0), (0, 1 << 20)])
def test_ranks_outside_of_the_size_are_refused(rank: int, size: int) -> None:
    cluster = Cluster("a")
    assert isinstance(cluster.error("a", cluster.join("a", rank, size)), InvalidArgument)


@pytest.mark.parametrize("seed", range(6))
def test_different_sizes_are_told_to_all_that_gather(seed: int) -> None:
    cluster = Cluster("abc", seed)
    clients = {"a": cluster.join("a", 0, 4), "b": cluster.join("b", 1, 4), "c": cluster.join("c", 2, 3)}
    cluster.deliver_all()
    for name, client in clients.items():
        error = cluster.error(name, client)
        assert isinstance(error, MismatchError)
        assert error.field == "size"
        assert {"3", "4"} == set(error.by_rank.values())


def test_on_one_node_the_first_claim_to_a_rank_wins() -> None:
    cluster = Cluster("a")
    first, second = cluster.join("a", 0, 2, pid=11), cluster.join("a", 0, 2, pid=12)
    error = cluster.error("a", second)
    assert isinstance(error, RankClaimed)
    assert error.rank == 0
    assert "process 11 on node 'a'" in error.message
    cluster.join("a", 1, 2)
    assert first in cluster.agents["a"].admitted


@pytest.mark.parametrize("seed", range(6))
def test_of_two_waiting_nodes_the_lower_name_wins_the_rank(seed: int) -> None:
    cluster = Cluster("abc", seed)
    low, high = cluster.join("a", 1, 2, pid=11), cluster.join("b", 1, 2, pid=12)
    cluster.deliver_all()
    error = cluster.error("b", high)
    assert isinstance(error, RankClaimed)
    assert "process 11 on node 'a'" in error.message
    first = cluster.join("c", 0, 2)
    cluster.deliver_all()
    assert cluster.started("c", first).group == cluster.started("a", low).group


def test_a_rank_that_runs_cannot_be_claimed_from_any_node() -> None:
    cluster = Cluster("ab")
    cluster.join("b", 0, 2)
    cluster.join("b", 1, 2)
    cluster.deliver_all()
    here, there = cluster.join("b", 0, 2), cluster.join("a", 1, 2)
    cluster.deliver_all()
    assert isinstance(cluster.error("b", here), RankClaimed)
    assert isinstance(cluster.error("a", there), RankClaimed)
    assert cluster.agents["b"].ended == {}


def test_the_deadline_names_the_ranks_that_never_came() -> None:
    cluster = Cluster("ab")
    one, two = cluster.join("a", 0, 4, deadline_at=5.0), cluster.join("b", 2, 4, deadline_at=6.0)
    cluster.deliver_all()
    assert cluster.agents["a"].timer == 5.0
    cluster.now = 5.0
    cluster.tell("a", TimePassed())
    cluster.deliver_all()
    cluster.now = 6.0
    cluster.tell("b", TimePassed())
    for name, client in (("a", one), ("b", two)):
        error = cluster.error(name, client)
        assert isinstance(error, DeadlineExceeded)
        assert error.missing == (1, 3)
    assert cluster.agents["a"].timer is None


def test_a_killed_client_breaks_the_group_everywhere_and_is_named() -> None:
    cluster, clients = formed("abc")
    group = cluster.started("b", clients["b"]).group
    cluster.tell("b", ClientGone(clients["b"], "while it waited for barrier (its call 3), for 2 s"))
    cluster.deliver_all()
    for name in "ac":
        error = cluster.agents[name].ended[clients[name]]
        assert isinstance(error, RankLost)
        assert (error.ranks, error.nodes) == ((1,), ("b",))
        assert error.message == (
            "rank 1 (process 101 on node 'b') ended without leaving the group, "
            "while it waited for barrier (its call 3), for 2 s"
        )
        assert "form the group anew" in error.hint
        (change,) = cluster.agents[name].changes(group)
        assert change.change.ended
    assert cluster.agents["b"].membership.snapshot().groups == ()
    for name in "ac":
        cluster.tell(name, ClientGone(clients[name]))
    cluster.deliver_all()
    for agent in cluster.agents.values():
        assert agent.engine[-1] == GroupForgotten(group)


def test_ranks_that_leave_are_told_to_all_and_the_last_one_ends_the_group() -> None:
    cluster, clients = formed("ab")
    group = cluster.started("a", clients["a"]).group
    cluster.tell("a", ClientLeaving(clients["a"], group))
    cluster.deliver_all()
    assert cluster.agents["b"].engine[-1] == cluster.agents["a"].engine[-1] == RanksLeft(group, (0,))
    cluster.tell("a", ClientGone(clients["a"]))
    cluster.tell("b", ClientLeaving(clients["b"], group))
    cluster.deliver_all()
    assert all(agent.engine[-1] == GroupForgotten(group) for agent in cluster.agents.values())
    assert cluster.agents["a"].ended == cluster.agents["b"].ended == {}
    assert all(agent.membership.snapshot().groups == () for agent in cluster.agents.values())


def test_a_lost_agent_breaks_the_group_and_is_named() -> None:
    cluster, clients = formed("abc")
    cluster.kill("c")
    cluster.deliver_all()
    for name in "ab":
        error = cluster.agents[name].ended[clients[name]]
        assert isinstance(error, PeerLost)
        assert (error.nodes, error.ranks) == (("c",), (2,))


def test_an_agent_that_says_goodbye_counts_as_left() -> None:
    cluster, clients = formed("ab")
    group = cluster.started("a", clients["a"]).group
    cluster.leave("b")
    assert cluster.agents["a"].engine[-2:] == [RanksLeft(group, (1,)), NodeDeparted(group, "b")]
    assert cluster.agents["a"].ended == {}


def test_an_agent_started_anew_is_a_lost_one_first() -> None:
    cluster, clients = formed("ab")
    cluster.tell("a", PeerUp("b", 1))
    assert isinstance(cluster.agents["a"].ended[clients["a"]], PeerLost)
    assert cluster.agents["a"].membership.snapshot().peers == (("b", 1),)


def test_a_rerun_gathers_anew_while_the_old_group_breaks() -> None:
    cluster, clients = formed("ab")
    old = cluster.started("a", clients["a"]).group
    cluster.tell("a", ClientGone(clients["a"]))
    cluster.tell("b", ClientGone(clients["b"]))
    again = {"a": cluster.join("a", 0, 2), "b": cluster.join("b", 1, 2)}
    cluster.deliver_all()
    new = {cluster.started(name, client).group for name, client in again.items()}
    assert len(new) == 1
    assert old not in new


@pytest.mark.parametrize("seed", range(10))
def test_a_stale_claim_delays_the_rerun_but_is_never_in_it(seed: int) -> None:
    cluster = Cluster("ab", seed)
    old = cluster.join("b", 1, 2, pid=1)
    cluster.deliver_all()
    new_zero = cluster.join("a", 0, 2, pid=2)  # proposes at once, with the old claim of b
    cluster.tell("b", ClientGone(old))
    new_one = cluster.join("b", 1, 2, pid=2)
    cluster.deliver_all()
    assert cluster.started("a", new_zero).group == cluster.started("b", new_one).group
    assert cluster.agents["a"].ended == {}


def test_nonsense_of_peers_is_counted_and_harmless() -> None:
    cluster, clients = formed("ab")
    a = cluster.agents["a"]
    incarnation = a.incarnation
    both = (Member("b", 1, (0,)), Member("a", incarnation, (1,)))
    error: WireError = ("internal", "", "", {})
    frames: list[MembershipFrame] = [
        Announce(KEY, 2, 5, 1, 1, 0),
        Announce(KEY, -1, 0, 1, 1, 0),
        Retract(KEY, 99),
        Refuse(KEY, 99, error),
        Form(KEY, 5, 1, TILE, (), ()),
        Form(KEY, 5, 1, TILE, both, (1,)),
        Form(KEY, 5, 1, TILE, both[:1], (1,)),
        Form(KEY, 5, 1, TILE, (Member("a", 1, (0,)), Member("b", 2, (1,))), (1, 2)),
        Form(KEY, 5, 1, TILE, both, (1, 2)),
        Form(KEY, -5, 1, TILE, both, (1, 2)),
        Broken(77, 1, error),
        Left(77, 1, (0,)),
        Left(cluster.started("a", clients["a"]).group, 1, (0,)),
    ]
    for frame in frames:
        cluster.tell("a", FrameArrived("b", frame))
        cluster.tell("a", FrameArrived("nobody", frame))
    cluster.deliver_all()
    assert a.membership.snapshot().ignored > len(frames)
    assert a.ended == {}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_every_claim_ends_once_all_members_agree_and_runs_never_mix(data: st.DataObject, seed: int) -> None:
    """Random ranks on random nodes, random delivery, reset links, killed processes and agents, then a rerun."""
    names = "abcd"[: data.draw(st.integers(1, 4), label="agents")]
    cluster = Cluster(names, seed)
    rng = cluster.random
    owners: dict[int, tuple[str, int]] = {}  # client to (node, run)
    dead: set[int] = set()

    def some_steps() -> None:
        for _ in range(rng.randrange(12)):
            ready = [pair for pair, queue in cluster.queues.items() if queue]
            if ready:
                cluster.deliver_one(rng.choice(ready))

    def kill(client: int) -> None:
        name, _ = owners[client]
        if client not in dead and name in cluster.agents:
            dead.add(client)
            cluster.tell(name, ClientGone(client))

    for run in range(3):
        size = rng.randrange(1, 6)
        for rank in rng.sample(range(size), size):
            name = rng.choice(sorted(cluster.agents))
            owners[cluster.join(name, rank, size, pid=run)] = (name, run)
            some_steps()
            if rng.random() < 0.1:
                kill(rng.choice(sorted(owners)))
            if rng.random() < 0.05 and len(cluster.agents) > 1:
                cluster.kill(rng.choice(sorted(cluster.agents)))
            if rng.random() < 0.2 and len(cluster.agents) > 1:
                pair = sorted(rng.sample(sorted(cluster.agents), 2))
                cluster.cut(*pair)
                some_steps()
                cluster.link(*pair)
        if rng.random() < 0.7:
            cluster.deliver_all()
        for client in owners:  # the launcher kills what is left of a run before it starts the next
            if run < 2:
                kill(client)
    cluster.pass_time(400.0)

    groups: dict[int, GroupStarted] = {}
    for client, (name, _) in owners.items():
        agent = cluster.agents.get(name)
        if agent is None:
            continue
        if client not in dead:
            assert (client in agent.admitted) != (client in agent.rejected)
        if client in agent.admitted:
            started = agent.admitted[client]
            known = groups.setdefault(started.group, started)
            assert known.members == started.members
    for group, started in groups.items():
        inside = [client for client, (name, _) in owners.items() if _in_group(cluster, name, client, group)]
        gone = dead.union(*(agent.ended for agent in cluster.agents.values()))
        if len(inside) < started.size:  # a member is dead, or was not admitted: nobody waits for it
            assert gone.issuperset(inside)
        runs = {run for client, (name, run) in owners.items() if _in_group(cluster, name, client, group)}
        assert len(runs) == 1
    for agent in cluster.agents.values():
        assert agent.membership.snapshot().gatherings == ()


def _in_group(cluster: Cluster, name: str, client: int, group: int) -> bool:
    agent = cluster.agents.get(name)
    return agent is not None and client in agent.admitted and agent.admitted[client].group == group


def test_a_rank_that_comes_after_others_were_refused_for_their_sizes_does_not_wait_for_them() -> None:
    cluster = Cluster("abcd")
    waiting = cluster.join("d", 1, 4)
    refused = cluster.join("a", 0, 4), cluster.join("c", 2, 3)
    cluster.deliver_all()
    late = cluster.join("d", 3, 4)
    for name, client in (("a", refused[0]), ("c", refused[1]), ("d", waiting), ("d", late)):
        error = cluster.error(name, client)
        assert isinstance(error, MismatchError)
        assert {error.by_rank[rank] for rank in (0, 2)} == {"3", "4"}
    # A rank that comes again is another attempt.
    again = {rank: ("abcd"[rank], cluster.join("abcd"[rank], rank, 4)) for rank in (0, 1)}
    cluster.deliver_all()
    again |= {rank: ("abcd"[rank], cluster.join("abcd"[rank], rank, 4)) for rank in (3, 2)}
    cluster.deliver_all()
    assert len({cluster.started(name, client).group for name, client in again.values()}) == 1


def test_ranks_that_were_refused_for_their_sizes_are_forgotten_after_a_while() -> None:
    cluster = Cluster("ab")
    cluster.join("a", 0, 4)
    cluster.join("b", 2, 3)
    cluster.deliver_all()
    cluster.now = 2 * T
    late = cluster.join("b", 3, 4)
    assert late not in cluster.agents["b"].rejected
