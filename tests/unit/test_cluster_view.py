"""The reports of several agents put together, and as text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.support.reports import CALL, GATHERING, REPORT, agent, group_at, operation

from allreduced.cli.cluster_merge import put_together
from allreduced.cli.cluster_text import columns, duration, lines, printable, ranks_text
from allreduced.cli.cluster_view import CallView, ClusterView, LinkView, OperationView, RankView
from allreduced.cli.status import as_json
from allreduced.core.identity import GroupKey, Member
from allreduced.core.limits import MAX_SECONDS
from allreduced.protocol.status import (
    AgentReport,
    ClaimReport,
    FailedReport,
    GatheringReport,
    HiddenReport,
    OperationReport,
    PeerReport,
    ProcessReport,
    UnansweredReport,
)

SILENT_B = (UnansweredReport("b", "did not answer within 1.25 s; last heard of 3.4 s ago"),)


def only_operation(view: ClusterView) -> OperationView:
    [group] = view.groups
    [found] = group.operations
    return found


def text(view: ClusterView) -> str:
    return "\n".join(lines(view))


def test_a_rank_that_never_called_is_missing() -> None:
    view = put_together(
        [
            agent("a", group_at("a", operation((0, 5.0), (1, 4.5), missing=(2, 3)))),
            agent("b", group_at("b", operation((2, 4.75), missing=(0, 1, 3)))),
        ],
        (),
    )
    found = only_operation(view)
    assert (found.missing, found.unknown, found.age) == ((3,), (), 5.0)
    assert [(arrival.rank, arrival.ago) for arrival in found.arrivals] == [(0, 5.0), (2, 4.75), (1, 4.5)]
    assert found.calls == (CallView("all_reduce", "float32", "sum", "(3, 4)", 12, 48, -1, "", (0, 1, 2)),)
    assert "waits for rank 3 (pid 103 on b, running), which has not called it" in text(view)
    assert "called by rank 0 5.0 s ago, rank 2 250 ms later, rank 1 500 ms later" in text(view)


def test_ranks_of_an_agent_that_does_not_know_the_operation_are_missing() -> None:
    reports = [agent("a", group_at("a", operation((0, 5.0), (1, 4.0), missing=(2, 3)))), agent("b", group_at("b"))]
    assert only_operation(put_together(reports, ())).missing == (2, 3)


def test_an_agent_whose_report_was_cut_may_know_more() -> None:
    reports = [
        agent("a", group_at("a", operation((0, 5.0), (1, 4.0), missing=(2, 3)))),
        agent("b", group_at("b", more=5)),
    ]
    found = only_operation(put_together(reports, ()))
    assert (found.missing, found.unknown) == ((), (2, 3))


def test_ranks_of_an_agent_that_did_not_answer_are_unknown_unless_others_heard_of_them() -> None:
    view = put_together([agent("a", group_at("a", operation((0, 5.0), missing=(1, 3))))], SILENT_B)
    found = only_operation(view)
    assert (found.missing, found.unknown) == ((1,), (3,))
    [group] = view.groups
    assert [(rank.rank, rank.pid, rank.state) for rank in group.ranks[2:]] == [(2, 0, "unknown"), (3, 0, "unknown")]
    assert [member.state for member in group.members] == ["running", "unknown"]
    assert "  b: no answer: did not answer within 1.25 s; last heard of 3.4 s ago" in lines(view)
    assert "    waits for rank 3: not known, the agent of b did not answer about it" in lines(view)


def test_a_stopped_process_is_named_as_one() -> None:
    there = replace(group_at("b"), ranks=(ProcessReport(2, 102, "running"), ProcessReport(3, 103, "stopped")))
    view = put_together([agent("a", group_at("a", operation((0, 1.0), (1, 1.0), missing=(3,)))), agent("b", there)], ())
    assert "waits for rank 3 (pid 103 on b, stopped), which has not called it" in text(view)


def test_different_calls_are_all_told() -> None:
    here = operation((0, 5.0), missing=(1, 2, 3), waits_for="calls")
    there = operation((2, 4.0), missing=(0, 1, 3), waits_for="calls")
    there = replace(there, calls=(replace(CALL, shape="(5,)", count=5, ranks=(2,)),))
    view = put_together([agent("a", group_at("a", here)), agent("b", group_at("b", there))], ())
    found = only_operation(view)
    assert [(call.shape, call.ranks) for call in found.calls] == [("(3, 4)", (0,)), ("(5,)", (2,))]
    assert found.missing == (1, 3)
    told = lines(view)
    assert "    the ranks call it differently, so it will fail:" in told
    assert "      rank 0: all_reduce sum float32 (3, 4), 48 B" in told
    assert "      rank 2: all_reduce sum float32 (5,), 20 B" in told


def test_where_all_called_each_node_says_what_it_waits_for() -> None:
    here = replace(operation((0, 5.0), (1, 5.0), missing=()), waits_for="data", nodes=("b",), state="running")
    there = replace(operation((2, 5.0), (3, 5.0), missing=()), waits_for="memory", nodes=(), state="queued")
    told = lines(put_together([agent("a", group_at("a", here)), agent("b", group_at("b", there))], ()))
    assert "    a waits for data of b" in told
    assert "    b waits for memory of its own" in told


def test_a_failed_operation_tells_who_has_not_called_it() -> None:
    failed = replace(group_at("b"), failed=(FailedReport("w", 0, "mismatch", "ranks differ", (3,)),))
    here = replace(group_at("a"), failed=(FailedReport("w", 0, "mismatch", "ranks differ", (1,)),))
    view = put_together([agent("a", here), agent("b", failed)], ())
    assert view.groups[0].failed[0].waiting == (1, 3)
    assert "  operation 'w' (use 0) failed; ranks 1, 3 have not called it yet" in lines(view)
    assert "    mismatch: ranks differ" in lines(view)


def test_a_group_that_is_broken_on_one_node_is_broken() -> None:
    broken = replace(group_at("b"), state="broken", error="rank_lost", reason="rank 2 ended")
    view = put_together([agent("a", group_at("a")), agent("b", broken)], ())
    [group] = view.groups
    assert (group.state, group.error, group.reason) == ("broken", "rank_lost", "rank 2 ended")
    assert "  rank_lost: rank 2 ended" in lines(view)
    assert "  a does not know so yet" in lines(view)


def test_a_change_that_is_being_agreed_is_told() -> None:
    here = operation((0, 1.0), (1, 1.0), missing=(3,), waits_for="change")
    changing = replace(group_at("a", replace(here, nodes=("b",))), state="changing")
    view = put_together([agent("a", changing), agent("b", group_at("b"))], ())
    [group] = view.groups
    assert [group.state, *(member.state for member in group.members)] == ["changing", "changing", "running"]
    assert "    a waits for a change of the group to be agreed with b" in lines(view)
    assert "    waits for rank 3 (pid 103 on b, running), which has not called it" in lines(view)


@pytest.mark.parametrize(
    ("word", "nodes", "said"),
    [
        ("verdict", ("b",), "a waits for the word of b on whether it failed"),
        ("change", (), "a waits for a change of the group to be agreed"),
        ("rest", (), "a waits for what was under way before the last change of the group to stop"),
        ("result", ("b",), "a waits for the result, which it fetches from b"),
        ("quorum", ("b",), "a waits for a sign of life of b, for it may be cut off"),
        ("withdrawal", ("b",), "a waits for memory to be given back by b"),
        ("peer_memory", ("b",), "a waits for memory of b"),
        ("kernels", (), "a waits for its reductions and sends"),
    ],
)
def test_each_word_for_what_is_waited_for_is_put_in_words(word: str, nodes: tuple[str, ...], said: str) -> None:
    here = replace(operation((0, 1.0), (1, 1.0), missing=(), waits_for=word), nodes=nodes)
    assert f"    {said}" in lines(put_together([agent("a", group_at("a", here))], SILENT_B))


def test_a_member_without_a_process_in_the_group_is_gone() -> None:
    [group] = put_together([agent("a", group_at("a")), agent("b")], ()).groups
    assert [member.state for member in group.members] == ["running", "gone"]
    assert [rank.state for rank in group.ranks] == ["running", "running", "gone", "gone"]
    started_anew = replace(agent("b", gatherings=(replace(GATHERING, key=group_at("b").key),)), incarnation=99)
    [group] = put_together([agent("a", group_at("a")), started_anew], ()).groups
    assert [member.state for member in group.members] == ["running", "gone"]


@pytest.mark.parametrize("there", [replace(agent("b"), left_out=1), agent("b", gatherings=(GATHERING,))])
def test_an_agent_that_may_not_tell_of_the_group_is_not_said_to_have_no_process(there: AgentReport) -> None:
    there = replace(there, gatherings=tuple(replace(one, key=group_at("b").key) for one in there.gatherings))
    [group] = put_together([agent("a", group_at("a")), there], ()).groups
    assert [member.state for member in group.members] == ["running", "unknown"]


def test_ranks_that_left_or_are_gone_are_told() -> None:
    there = replace(group_at("b"), ranks=(), left=(2,))
    [group] = put_together([agent("a", group_at("a")), agent("b", there)], ()).groups
    assert group.ranks[2:] == (RankView(2, "b", 0, 1000, "left"), RankView(3, "b", 0, 1000, "gone"))


def test_the_newest_generation_is_shown() -> None:
    newer = replace(group_at("b"), generation=2, members=(Member("b", 12, (2, 3)),))
    [group] = put_together([agent("a", group_at("a")), agent("b", newer)], ()).groups
    assert group.generation == 2
    assert [member.node for member in group.members] == ["b"]


def test_claims_of_all_agents_are_joined_and_missing_ranks_named() -> None:
    key = GroupKey(1000, "job", "world")
    here = GatheringReport(key, 4, (ClaimReport(0, "a", 100, 9.0), ClaimReport(2, "c", 102, 3.0)), ())
    # b has not heard of rank 0, and no more of its own rank 1's first process.
    there = GatheringReport(key, 4, (ClaimReport(1, "b", 101, 4.0),), ())
    old = GatheringReport(key, 4, (*here.claims, ClaimReport(1, "b", 99, 8.0)), ())
    view = put_together([agent("a", gatherings=(old,)), agent("b", gatherings=(there,))], ())
    [gathering] = view.gatherings
    assert [(claim.rank, claim.pid, claim.waits) for claim in gathering.claims] == [
        (0, 100, 9.0),
        (1, 101, 4.0),
        (2, 102, 3.0),
    ]
    assert gathering.missing == (3,)
    assert "group 'world' of job 'job', uid 1000: gathers, 3 of 4 ranks are there" in lines(view)
    assert "  waits for rank 3, which has not connected" in lines(view)


def test_agents_that_have_not_agreed_are_named() -> None:
    complete = GatheringReport(GATHERING.key, 1, (ClaimReport(0, "a", 5, 1.0),), ("b",))
    told = lines(put_together([agent("a", gatherings=(complete,))], ()))
    assert "  every rank is there; waits for the agent of b to agree" in told


def test_groups_of_others_are_counted() -> None:
    reports = [replace(agent(node), hidden=(HiddenReport(1001, count),)) for node, count in (("a", 2), ("b", 3))]
    view = put_together(reports, ())
    assert [(hidden.uid, hidden.groups) for hidden in view.hidden] == [(1001, 3)]
    assert "3 groups of uid 1001: only that user and root see more" in lines(view)


def test_a_whole_view_as_text() -> None:
    told = put_together(
        [REPORT], (UnansweredReport("b", "there is no link to it"), UnansweredReport("", "nobody at x"))
    )
    assert (
        text(told)
        == """\
agents
  NODE  PID  UID   UP          CLIENTS  GROUPS
  a     42   1000  1 min 40 s  3        1       this one was asked
  b: no answer: there is no link to it
  ?: no answer: nobody at x

links
  NODE  PEER  DATA BY
  a     b     tcp

group 'world' of job 'job-1', uid 1000: generation 1, 4 ranks on 2 nodes, running
  ranks 2-3 on b: its agent did not answer
  RANK  NODE  PID  UID   PROCESS
  0     a     100  1000  running
  1     a     101  1000  stopped
  2     b     -    1000  unknown
  3     b     -    1000  unknown
  operation 'w' (use 2): all_reduce sum float32 (3, 4), 48 B, began 12.5 s ago, 4 min 48 s to its deadline
    waits for ranks 2-3: not known, the agent of b did not answer about it
    called by rank 0 12.5 s ago, rank 1 500 ms later
  operation 'x' (use 0) failed; rank 1 has not called it yet
    mismatch: ranks differ

group 'world' of job 'job-2', uid 1000: gathers, 1 of 2 ranks is there
  RANK  NODE  PID  UID   WAITS
  0     a     102  1000  1.5 s
  waits for rank 1, which has not connected

2 groups of uid 1001: only that user and root see more"""
    )


def test_large_groups_are_summed_up() -> None:
    members = (Member("a", 11, tuple(range(64))),)
    processes = tuple(ProcessReport(rank, 1000 + rank, "stopped" if rank == 7 else "running") for rank in range(64))
    called = operation(*((rank, 10.0 - rank / 10) for rank in range(40)), missing=tuple(range(40, 64)))
    group = replace(group_at("a", called), size=64, members=members, ranks=processes)
    told = lines(put_together([agent("a", group)], ()))
    assert "  7     a     1007  1000  stopped" in told
    assert "  63 ranks whose processes run" in told
    assert "    waits for rank 55 (pid 1055 on a, running), which has not called it" in told
    assert "    … and for 8 more: ranks 56-63" in told
    [called_by] = [line for line in told if "called by" in line]
    assert "rank 0 10.0 s ago, … 24 others, rank 25 2500 ms later" in called_by
    assert called_by.endswith("rank 39 3900 ms later")
    assert len(told) < 40


def test_nothing_is_said_clearly() -> None:
    assert lines(put_together([agent("a")], ()))[-1] == "no groups"
    assert "  no operation is in flight" in lines(put_together([agent("a", group_at("a"))], ()))


def test_unknown_words_and_numbers_of_newer_agents_are_shown() -> None:
    strange = replace(CALL, dtype=200, op=201, kind="all_to_all")
    newer = replace(operation((0, 1.0), (1, 1.0), missing=()), waits_for="the moon", calls=(strange,))
    view = put_together([agent("a", group_at("a", newer))], ())
    assert (only_operation(view).calls[0].dtype, only_operation(view).calls[0].op) == ("200", "201")
    assert "all_to_all 201 200 (3, 4), 0 B" in text(view)


def test_no_deadline_is_none() -> None:
    endless = replace(operation((0, 1.0), missing=(1,)), deadline=MAX_SECONDS)
    view = put_together([agent("a", group_at("a", endless))], ())
    assert only_operation(view).deadline is None
    assert "deadline" not in text(view)


# Links


def linked(node: str, *peers: tuple[str, str, str]) -> AgentReport:
    reports = tuple(PeerReport(peer, 12, "", 0.0, transport, way) for peer, transport, way in peers)
    return replace(agent(node), peers=reports)


def test_each_link_tells_what_carries_its_data_and_why() -> None:
    lacks = "the other end declined: this machine has no RDMA device"
    view = put_together(
        [
            linked("a", ("b", "rdma", "mlx5_0 port 1"), ("c", "tcp", lacks)),
            linked("b", ("a", "rdma", "mlx5_1 port 1")),
            linked("c", ("a", "tcp", "this machine has no RDMA device")),
        ],
        (),
    )
    assert view.links == (
        LinkView("a", "b", "rdma", "mlx5_0 port 1"),
        LinkView("a", "c", "tcp", lacks),
        LinkView("b", "a", "rdma", "mlx5_1 port 1"),
        LinkView("c", "a", "tcp", "this machine has no RDMA device"),
    )
    told = text(view)
    assert (
        "\n".join(
            [
                "links",
                "  NODE  PEER  DATA BY",
                "  a     b     rdma     mlx5_0 port 1",
                "  c     a     tcp      this machine has no RDMA device",
            ]
        )
        in told
    )
    assert "declined" not in told  # one line for a pair, of the end that knows
    [alone] = [
        line
        for line in lines(put_together([linked("a", ("c", "tcp", lacks)), linked("c", ("a", "tcp", ""))], ()))
        if "tcp" in line
    ]
    assert alone == f"  a     c     tcp      {lacks}"


def test_of_many_links_those_are_listed_that_are_unlike_the_others() -> None:
    peers = [(f"n{number:02}", "rdma", "mlx5_0 port 1") for number in range(20)]
    view = put_together([linked("a", *peers, ("slow", "tcp", "the peer has no RDMA device"))], ())
    told = lines(view)
    at = told.index("links")
    assert told[at + 1 : at + 4] == [
        "  21 pairs of agents, their data carried: 20 by rdma, 1 by tcp",
        "  NODE  PEER  DATA BY",
        "  a     slow  tcp      the peer has no RDMA device",
    ]


def test_agents_that_do_not_tell_of_their_links_have_none_listed() -> None:
    view = put_together([linked("a", ("b", "", ""))], ())
    assert view.links == (LinkView("a", "b", "", ""),)
    assert "links" not in text(view)


def test_names_cannot_command_the_terminal() -> None:
    evil = replace(operation((0, 1.0), missing=(1,)), name="\x1b[2Jw\n")
    assert "\x1b" not in text(put_together([agent("a", group_at("a", evil))], ()))
    assert printable("\x1b[2Jé\n") == "\\x1b[2Jé\\n"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (12.34, "12.3 s"), (60, "1 min 00 s"), (3599.6, "1 h 00 min"), (93784, "1 d 02 h")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("ranks", "said"), [((3,), "rank 3"), ((0, 1), "ranks 0-1"), ((7, 0, 2, 1), "ranks 0-2, 7"), ((1, 3), "ranks 1, 3")]
)
def test_ranks_are_listed_in_spans(ranks: tuple[int, ...], said: str) -> None:
    assert ranks_text(ranks) == said


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert columns(("A", "B"), [("xxx", "y"), ("z", "")]) == ["  A    B", "  xxx  y", "  z"]


# JSON

AGENT_KEYS = {"node", "incarnation", "pid", "uid", "uptime", "clients", "groups", "left_out"}
GROUP_KEYS = {
    *("group", "uid", "job", "name", "state", "generation", "size", "members", "ranks", "error", "reason"),
    *("operations", "failed", "more"),
}
OPERATION_KEYS = {"name", "use", "age", "deadline", "calls", "arrivals", "missing", "unknown", "waits"}
CALL_KEYS = {"kind", "dtype", "op", "shape", "count", "nbytes", "root", "algorithm", "ranks"}


def test_the_keys_of_json_are_those_that_programs_rely_on() -> None:
    found = json.loads(json.dumps(as_json(put_together([REPORT], SILENT_B))))
    assert set(found) == {"version", "asked", "agents", "links", "unanswered", "groups", "gatherings", "hidden"}
    assert (found["version"], found["asked"]) == (1, "a")
    assert set(found["agents"][0]) == AGENT_KEYS
    assert found["links"] == [{"node": "a", "peer": "b", "transport": "tcp", "way": ""}]
    assert found["unanswered"] == [{"node": "b", "reason": SILENT_B[0].reason}]
    [group] = found["groups"]
    assert set(group) == GROUP_KEYS
    assert set(group["members"][0]) == {"node", "ranks", "state", "error", "reason"}
    assert group["ranks"][1] == {"rank": 1, "node": "a", "pid": 101, "uid": 1000, "state": "stopped"}
    [one] = group["operations"]
    assert set(one) == OPERATION_KEYS
    assert set(one["calls"][0]) == CALL_KEYS
    assert one["arrivals"] == [{"rank": 0, "ago": 12.5}, {"rank": 1, "ago": 12.0}]
    assert one["waits"] == [{"node": "a", "state": "gathering", "waits_for": "ranks", "nodes": ["b"]}]
    assert set(group["failed"][0]) == {"name", "use", "error", "reason", "waiting"}
    [gathering] = found["gatherings"]
    assert set(gathering) == {"uid", "job", "name", "size", "claims", "missing", "silent"}
    assert gathering["claims"] == [{"rank": 0, "node": "a", "pid": 102, "uid": 1000, "waits": 1.5}]
    assert found["hidden"] == [{"uid": 1001, "groups": 2}]


def test_held_calls_miss_nobody() -> None:
    held = OperationReport("w", 0, "held", 0.0, 30.0, (CALL,), (), (), "names", ("b",))
    view = put_together([agent("a", group_at("a", held)), agent("b", group_at("b"))], ())
    assert (only_operation(view).missing, only_operation(view).unknown) == ((), ())
    assert "    a waits for the agent of b to agree which names are not used any more" in lines(view)
