"""What an agent tells about itself, and to whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulation.cluster import fingerprint
from tests.support.reports import GATHERING, GROUP, OPERATION, REPORT

from allreduced.core.errors import PeerLost, to_wire
from allreduced.core.identity import GroupKey, Member
from allreduced.daemon.engine.actions import Action, CancelReceive, CreateArena, Reduce
from allreduced.daemon.engine.engine import Engine
from allreduced.daemon.engine.events import (
    ArenaReady,
    Changed,
    Event,
    FrameArrived,
    Freeze,
    GroupBroken,
    GroupStarted,
    RanksLeft,
    ReceiveCancelled,
    Reduced,
    Submitted,
    TimePassed,
)
from allreduced.daemon.engine.limits import Limits
from allreduced.daemon.engine.region import Region
from allreduced.daemon.membership.instance import GatheringView, GroupView, Snapshot
from allreduced.daemon.ports import ReachablePeer
from allreduced.daemon.report import AgentFacts, make_report, sees_everything
from allreduced.protocol.change import Change, Loss, Result
from allreduced.protocol.peer import Abort, Arrived, Differs, Forget, Queued, Ready
from allreduced.protocol.peer import Call as PeerCall
from allreduced.protocol.status import (
    MAX_LISTED,
    MAX_OPERATIONS,
    MAX_REPORT,
    AgentReport,
    ClaimReport,
    GatheringReport,
    GroupReport,
    HiddenReport,
    OperationReport,
    PeerReport,
    ProcessReport,
    fit,
)

KEY = GroupKey(1000, "job", "world")
MEMBERS = (Member("a", 1, (0, 1)), Member("b", 1, (2, 3)))
FACTS = AgentFacts("a", 11, 42, 500, 60.0, 2)


class Bench:
    """The engine of a, and a group of two ranks on each of a and b."""

    def __init__(self, members: tuple[Member, ...] = MEMBERS, mine: int = 0) -> None:
        self.engine = Engine("a", Limits())
        self.now = 100.0
        self.requests = 0
        self.arenas: list[int] = []
        self.jobs: list[int] = []
        self.members = members
        ranks = members[mine].ranks
        self.engine.handle(
            GroupStarted(7, KEY, 1, 1 << 20, members, mine, {rank: 50 + rank for rank in ranks}), self.now
        )

    def submit(self, rank: int, name: str = "w", count: int = 100, deadline: float = 300.0) -> None:
        self.requests += 1
        source = Region(1 + rank, 0, 4 * count)
        call = fingerprint(count=count)
        self.do(Submitted(50 + rank, self.requests, 7, rank, name, call, source, self.now + deadline, 0))

    def do(self, event: Event) -> list[Action]:
        out: list[Action] = []
        for action in self.engine.handle(event, self.now):
            if isinstance(action, CreateArena):
                self.arenas.append(action.buffer)
            elif isinstance(action, Reduce):
                self.jobs.append(action.job)
            out.append(action)
        return out

    def frame(self, frame: Abort | Arrived | Queued | Differs | Ready | Forget) -> None:
        self.do(FrameArrived("b", frame))

    def group(self, state: str = "running", generation: int = 1, awaited: tuple[str, ...] = ()) -> GroupReport:
        """Report what memberships say by the arguments, and the engine by itself."""
        local = ((0, 50, 100), (1, 51, 101))
        view = GroupView(7, KEY, state, 4, self.members, local, (), generation, None, awaited)
        report = make_report(
            1000,
            FACTS,
            self.engine.snapshot(self.now),
            Snapshot((view,), (), (), 0),
            (),
            {50: "running", 51: "stopped"}.__getitem__,
            self.now,
        )
        return report.groups[0]

    def operation(self, generation: int = 1) -> OperationReport:
        [operation] = self.group(generation=generation).operations
        return operation


def test_a_rank_that_did_not_call_is_missing_and_when_the_others_came_is_told() -> None:
    bench = Bench()
    bench.submit(0, deadline=30.0)
    bench.now += 2.0
    bench.submit(1)
    bench.now += 3.0  # nothing happens, but time passes
    operation = bench.operation()
    assert operation.arrivals == ((0, 5.0), (1, 3.0))
    assert (operation.age, operation.deadline) == (5.0, 25.0)
    assert (operation.missing, operation.waits_for, operation.nodes) == ((2, 3), "ranks", ("b",))
    assert [(call.kind, call.shape, call.ranks) for call in operation.calls] == [("all_reduce", "(100,)", (0, 1))]
    bench.frame(Arrived(7, 1, "w", 0, (3,)))
    assert bench.operation().missing == (2,)
    bench.frame(Queued(7, 1, "w", 0, ()))
    assert (bench.operation().missing, bench.operation().waits_for) == ((), "memory")


def test_where_all_ranks_came_it_is_told_what_is_waited_for() -> None:
    bench = Bench()
    bench.submit(0)
    bench.submit(1)
    bench.frame(Queued(7, 1, "w", 0, ()))
    assert (bench.operation().state, bench.operation().waits_for) == ("mapping", "memory")
    for buffer in bench.arenas:
        bench.do(ArenaReady(buffer))
    operation = bench.operation()
    assert (operation.state, operation.waits_for, operation.nodes) == ("ready", "peer_memory", ("b",))
    bench.frame(Ready(7, 1, "w", 0, 1, fingerprint(count=100), (), ()))
    operation = bench.operation()
    assert (operation.state, operation.waits_for, operation.nodes) == ("running", "data", ("b",))
    assert operation.missing == ()


def test_processes_and_their_state_are_told() -> None:
    assert Bench().group().ranks == (ProcessReport(0, 100, "running"), ProcessReport(1, 101, "stopped"))


def test_an_operation_that_only_another_node_knows_is_told() -> None:
    bench = Bench()
    bench.frame(Arrived(7, 1, "w", 0, (2,)))
    operation = bench.operation()
    assert (operation.age, operation.arrivals, operation.calls) == (0.0, (), ())
    assert (operation.missing, operation.nodes) == ((0, 1, 3), ("a", "b"))


def test_a_dispute_and_then_its_outcome_are_told() -> None:
    bench = Bench()
    bench.submit(0, count=100)
    bench.frame(Differs(7, 1, "w", 0, (PeerCall(fingerprint(count=200), (2,)),)))
    operation = bench.operation()
    assert (operation.waits_for, operation.missing) == ("calls", (1, 2, 3))
    bench.now += 2.0
    bench.engine.handle(TimePassed(), bench.now)
    group = bench.group()
    assert group.operations == ()
    [failed] = group.failed
    assert (failed.name, failed.use, failed.error, failed.waiting) == ("w", 0, "mismatch", (1,))
    assert "rank 0" in failed.reason
    assert "(200,)" in failed.reason


def test_two_calls_of_one_node_are_both_told() -> None:
    bench = Bench()
    bench.submit(0, count=100)
    bench.submit(1, count=200)
    calls = bench.operation().calls
    assert [(call.shape, call.ranks) for call in calls] == [("(100,)", (0,)), ("(200,)", (1,))]


def test_calls_that_wait_until_names_are_forgotten_are_told() -> None:
    bench = Bench((Member("b", 1, (0, 1)), Member("a", 1, (2, 3)), Member("c", 1, (4,))), mine=1)
    bench.submit(2)
    bench.submit(3)
    bench.frame(Abort(7, 1, "w", 0, to_wire(PeerLost("gone"))))
    bench.frame(Forget(7, 1, 1, ("w",), (1,)))
    bench.submit(3, deadline=30.0)
    operation = bench.operation()
    assert (operation.name, operation.state, operation.waits_for, operation.nodes) == ("w", "held", "names", ("c",))
    assert (operation.deadline, operation.calls[0].ranks, operation.missing) == (30.0, (3,), ())


def test_a_broken_group_tells_why_and_ranks_that_left_are_told() -> None:
    bench = Bench()
    bench.submit(0)
    bench.engine.handle(RanksLeft(7, (3,)), bench.now)
    bench.engine.handle(GroupBroken(7, PeerLost("agent 'b' was silent", nodes=("b",))), bench.now)
    group = bench.group()
    assert (group.state, group.error, group.reason) == ("broken", "peer_lost", "agent 'b' was silent")
    assert group.operations == ()


def test_the_members_that_a_group_was_formed_with_are_told_after_a_change_without_some() -> None:
    bench = Bench()
    loss = Loss("b", (2, 3), True, True, to_wire(PeerLost("agent 'b' was killed", nodes=("b",))))
    change = Change(2, MEMBERS[:1], (loss,), True, (), (), (), 0, ())
    bench.do(Freeze(7, 1))
    bench.do(Changed(7, 1, change))
    group = bench.group()
    assert (group.state, group.generation, group.members) == ("broken", 2, MEMBERS)


def running(bench: Bench) -> None:
    """Let an operation run that waits for data of b."""
    bench.submit(0)
    bench.submit(1)
    for buffer in bench.arenas:
        bench.do(ArenaReady(buffer))
    bench.frame(Ready(7, 1, "w", 0, 1, fingerprint(count=100), (), ()))


def test_what_members_agree_on_is_waited_for() -> None:
    bench = Bench()
    running(bench)
    bench.do(Freeze(7, 1))
    group = bench.group(state="changing", awaited=("b",))
    assert (group.state, group.operations[0].waits_for, group.operations[0].nodes) == ("changing", "change", ("b",))
    change = Change(2, MEMBERS, (), False, (), (Result("w", 0, (1,)),), (), 0, ())
    actions = bench.do(Changed(7, 1, change))
    operation = bench.operation(generation=2)
    assert (operation.state, operation.waits_for, operation.nodes) == ("fetching", "rest", ())
    for action in actions:
        if isinstance(action, CancelReceive):
            bench.do(ReceiveCancelled(action.receive))
        elif isinstance(action, Reduce):
            bench.do(Reduced(action.job))
    for job in bench.jobs:
        bench.do(Reduced(job))
    operation = bench.operation(generation=2)
    assert (operation.state, operation.waits_for, operation.nodes) == ("fetching", "result", ("b",))


def test_where_nobody_has_the_result_what_was_under_way_is_waited_for() -> None:
    bench = Bench()
    running(bench)
    bench.do(Freeze(7, 1))
    bench.do(Changed(7, 1, Change(2, MEMBERS, (), False, (), (), (), 0, ())))
    operation = bench.operation(generation=2)
    assert (operation.state, operation.waits_for, operation.nodes) == ("restarting", "rest", ())


def test_last_words_are_waited_for() -> None:
    bench = Bench((*MEMBERS, Member("c", 1, (4,))))
    running(bench)
    bench.do(FrameArrived("c", Ready(7, 1, "w", 0, 1, fingerprint(count=100), (), ())))
    bench.frame(Abort(7, 1, "w", 0, to_wire(PeerLost("no")), final=False))
    operation = bench.operation()
    assert (operation.state, operation.waits_for, operation.nodes) == ("running", "verdict", ("c",))


def test_a_result_that_no_quorum_stands_for_waits_for_signs_of_life() -> None:
    bench = Bench((Member("b", 1, (0, 1)), Member("a", 1, (2, 3))), mine=1)
    call = replace(fingerprint(count=0), kind="barrier", op=0)
    bench.do(FrameArrived("b", Ready(7, 1, "w", 0, 1, call, (), ())))
    bench.now += 60.0
    for rank in (2, 3):
        bench.do(Submitted(50 + rank, 1 + rank, 7, rank, "w", call, None, bench.now + 300.0, 0))
    operation = bench.operation()
    assert (operation.state, operation.waits_for, operation.nodes) == ("running", "quorum", ("b",))


def test_the_oldest_operations_are_told_where_there_are_too_many() -> None:
    bench = Bench()
    for number in range(MAX_OPERATIONS + 10):
        bench.submit(0, name=f"n{number}")
        bench.now += 1.0
    group = bench.group()
    assert [operation.name for operation in group.operations[:2]] == ["n0", "n1"]
    assert (len(group.operations), group.more) == (MAX_OPERATIONS, 10)
    [info] = bench.engine.snapshot(bench.now, 20)["groups"].values()
    assert [operation["name"] for operation in info["operations"]] == [f"n{number}" for number in range(20)]
    assert info["more"] == MAX_OPERATIONS - 10


# Who sees what


@pytest.mark.parametrize(("asker", "everything"), [(0, True), (500, True), (1000, False), (1001, False)])
def test_root_and_the_agents_user_see_everything(asker: int, everything: bool) -> None:
    assert sees_everything(asker, 500) is everything


def report_for(asker: int) -> AgentReport:
    groups = tuple(
        GroupView(uid, GroupKey(uid, "job", "world"), "running", 2, MEMBERS, (), (), 1, None) for uid in (1000, 1001)
    )
    forming = GroupView(9, GroupKey(1001, "next", "world"), "proposed", 2, MEMBERS, (), (), 1, None)
    gathering = GatheringView(GroupKey(1001, "next", "world"), 2, ((0, "a", 5, 90.0), (1, "b", 6, 95.0)), ("b",))
    peers = (ReachablePeer("b", 12, "", "10.0.0.2:5", -0.1, "rdma", "mlx5_0 port 1"),)
    return make_report(
        asker,
        FACTS,
        Engine("a", Limits()).snapshot(),
        Snapshot((*groups, forming), (gathering,), (), 0),
        peers,
        lambda client: "running",
        100.0,
    )


def test_a_user_sees_its_own_groups_and_how_many_others_there_are() -> None:
    report = report_for(1000)
    assert [group.key.uid for group in report.groups] == [1000]
    assert report.gatherings == ()
    assert report.hidden == (HiddenReport(1001, 2),)
    assert report.peers == (PeerReport("b", 12, "10.0.0.2:5", 0.0, "rdma", "mlx5_0 port 1"),)
    assert "next" not in repr(report)


def test_what_another_agent_says_about_a_link_is_bounded() -> None:
    peer = ReachablePeer("b", 12, "", "10.0.0.2:5", 0.0, "tcp", "é" * 5000)
    report = make_report(
        0, FACTS, Engine("a", Limits()).snapshot(), Snapshot((), (), (), 0), (peer,), lambda client: "running", 100.0
    )
    assert report.peers == (PeerReport("b", 12, "10.0.0.2:5", 0.0, "tcp", "é" * 299 + "…"),)


@pytest.mark.parametrize("asker", [0, 500])
def test_who_sees_everything_has_nothing_hidden(asker: int) -> None:
    report = report_for(asker)
    assert [group.key.uid for group in report.groups] == [1000, 1001]
    assert report.gatherings == (
        GatheringReport(
            GroupKey(1001, "next", "world"), 2, (ClaimReport(0, "a", 5, 10.0), ClaimReport(1, "b", 6, 5.0)), ("b",)
        ),
    )
    assert report.hidden == ()


# Bounds


def test_what_fits_stays_as_it_is() -> None:
    assert fit(REPORT) == REPORT


def test_operations_are_left_out_first_then_groups() -> None:
    large = replace(GROUP, operations=tuple(replace(OPERATION, name=f"{n:0250}") for n in range(MAX_OPERATIONS)))
    report = replace(REPORT, groups=(large,) * 4, gatherings=())
    fitted = fit(report, 100_000)
    assert len(fitted.groups) == 4
    assert {len(group.operations) + group.more for group in fitted.groups} == {MAX_OPERATIONS}
    assert all(group.operations == large.operations[: len(group.operations)] != () for group in fitted.groups)
    fewer = fit(report, 500)
    assert len(fewer.groups) + fewer.left_out == 4
    assert fewer.groups[0].more == MAX_OPERATIONS


def test_more_groups_than_can_be_listed_are_counted() -> None:
    fitted = fit(replace(REPORT, groups=(), gatherings=(GATHERING,) * (MAX_LISTED + 3)), MAX_REPORT)
    assert len(fitted.gatherings) + fitted.left_out == MAX_LISTED + 3


def test_nothing_is_too_large_in_the_end() -> None:
    peers = tuple(PeerReport("n" * 200, 1, "tcp://" + "x" * 400, 0.0) for _ in range(5000))
    assert len(fit(replace(REPORT, peers=peers), 10_000).peers) < 20
