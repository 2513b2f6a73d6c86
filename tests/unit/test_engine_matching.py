"""Who arrived at which operation, on one node and as peers see it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulation.cluster import fingerprint

from allreduced.core.dtypes import DType
from allreduced.core.errors import (
    AllReducedError,
    ClosedError,
    DeadlineExceeded,
    InvalidArgument,
    LimitExceeded,
    MismatchError,
    ProtocolError,
    RankLost,
    to_wire,
)
from allreduced.core.identity import GroupKey, Member
from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.actions import Action, CreateArena, Deliver, Fail, Reduce, SendFrame, SetTimer
from allreduced.daemon.engine.engine import Engine
from allreduced.daemon.engine.events import (
    ArenaReady,
    Event,
    FrameArrived,
    GroupBroken,
    GroupStarted,
    RanksLeft,
    Reduced,
    Submitted,
    TimePassed,
)
from allreduced.daemon.engine.limits import Limits
from allreduced.daemon.engine.region import Region
from allreduced.protocol.peer import (
    Abort,
    Arrived,
    Call,
    Confirm,
    Differs,
    EngineFrame,
    Fingerprint,
    Forget,
    Forgettable,
    Queued,
    Ready,
)

GROUP = 5
KEY = GroupKey(1, "job", "world")


class Bench:
    """One engine; arenas are ready at once."""

    def __init__(self, *members: tuple[str, tuple[int, ...]], limits: Limits | None = None) -> None:
        self.engine = Engine("a", limits or Limits())
        self.now = 100.0
        self.requests = 0
        listed = tuple(Member(node, 1, ranks) for node, ranks in members)
        mine = next(index for index, member in enumerate(listed) if member.node == "a")
        self.do(GroupStarted(GROUP, KEY, 1, 1 << 20, listed, mine, {rank: rank for rank in listed[mine].ranks}))

    def do(self, event: Event) -> list[Action]:
        """Return the actions, those that follow from ready arenas included."""
        actions = self.engine.handle(event, self.now)
        for action in list(actions):
            if isinstance(action, CreateArena):
                actions += self.do(ArenaReady(action.buffer))
        return actions

    def submit(
        self, rank: int, name: str = "x", described: Fingerprint | None = None, deadline: float = 30.0
    ) -> list[Action]:
        """Submit 100 float32 or what the fingerprint says."""
        described = described or fingerprint()
        self.requests += 1
        nbytes = described.count * DType(described.dtype).itemsize if described.dtype in (1, 2, 3, 4) else 0
        source = Region(rank, 0, nbytes) if nbytes else None
        return self.do(Submitted(rank, self.requests, GROUP, rank, name, described, source, self.now + deadline, 0))

    def frame(self, frame: EngineFrame, node: str = "b") -> list[Action]:
        """Let a peer send a frame."""
        return self.do(FrameArrived(node, frame))


def errors(actions: list[Action]) -> list[AllReducedError]:
    return [action.error for action in actions if isinstance(action, Fail)]


def frames(actions: list[Action]) -> list[EngineFrame]:
    return [action.frame for action in actions if isinstance(action, SendFrame)]


def ready(use: int = 0, name: str = "x", described: Fingerprint | None = None, attempt: int = 1) -> Ready:
    return Ready(GROUP, 1, name, use, attempt, described or fingerprint(kind="barrier", count=0), (), ())


def test_one_node_is_one_reduction_over_the_whole_tensor() -> None:
    bench = Bench(("a", (0, 1, 2)))
    big = fingerprint(count=3 << 20, op=Reduction.MEAN)
    assert bench.submit(2, described=big)[0] == SetTimer(130.0)
    assert bench.submit(0, described=big) == []
    actions = bench.submit(1, described=big)
    reduce = next(action for action in actions if isinstance(action, Reduce))
    assert [region.buffer for region in reduce.sources] == [0, 1, 2]
    assert (reduce.count, reduce.divisor, reduce.reduction) == (3 << 20, 3, Reduction.MEAN)
    delivers = bench.do(Reduced(reduce.job))
    assert [(action.client, action.region) for action in delivers if isinstance(action, Deliver)] == [
        (rank, reduce.target) for rank in range(3)
    ]


def test_small_results_come_without_a_lease() -> None:
    bench = Bench(("a", (0,)))
    job = next(action.job for action in bench.submit(0) if isinstance(action, Reduce))
    (deliver,) = bench.do(Reduced(job))
    assert isinstance(deliver, Deliver)
    assert deliver.lease == 0
    assert deliver.algorithm == "direct"
    assert bench.engine.snapshot()["memory"]["reserved_bytes"] == 0


def test_unnamed_and_named_calls_are_counted_per_rank() -> None:
    bench = Bench(("a", (0, 1)))
    barrier = fingerprint(kind="barrier", count=0)
    assert not [
        action for name in ("", "x", "") for action in bench.submit(0, name, barrier) if isinstance(action, Deliver)
    ]
    requests = [
        [action.request for action in bench.submit(1, name, barrier) if isinstance(action, Deliver)]
        for name in ("x", "", "")
    ]
    assert requests == [[2, 4], [1, 5], [3, 6]]


def test_a_mismatch_names_field_and_all_ranks_once_they_are_known() -> None:
    bench = Bench(("a", (0, 1)), ("b", (2, 3)))
    double = fingerprint(dtype=DType.FLOAT64)
    bench.submit(0)
    actions = bench.submit(1, described=double)
    told = Differs(GROUP, 1, "x", 0, (Call(fingerprint(), (0,)), Call(double, (1,))))
    assert (errors(actions), frames(actions)) == ([], [told])
    assert errors(bench.frame(Differs(GROUP, 1, "x", 0, (Call(fingerprint(), (2,)),)))) == []
    actions = bench.frame(Differs(GROUP, 1, "x", 0, (Call(fingerprint(), (2, 3)),)))
    [error, same] = errors(actions)
    assert isinstance(error, MismatchError)
    assert str(same) == str(error)
    assert (error.field, error.by_rank) == ("dtype", {0: "float32", 1: "float64", 2: "float32", 3: "float32"})
    assert error.message == (
        "group 'world' of job 'job': 'x' (use 0) was called differently: "
        "the dtype is float32 on ranks 0, 2, 3; float64 on rank 1"
    )
    assert frames(actions) == [Abort(GROUP, 1, "x", 0, to_wire(error))]


@pytest.mark.parametrize(
    ("other", "hint"),
    [
        (fingerprint(kind="barrier", count=0), "call the same collective on all ranks"),
        (fingerprint(op=Reduction.MAX), "give op the same value on all ranks"),
    ],
)
def test_the_hint_of_a_mismatch_speaks_of_what_the_caller_gives(other: Fingerprint, hint: str) -> None:
    bench = Bench(("a", (0, 1)))
    bench.submit(0)
    assert [error.hint for error in errors(bench.submit(1, described=other))] == [
        f"{hint}, or give different operations different names"
    ] * 2


def test_a_mismatch_waits_a_second_for_ranks_that_did_not_call() -> None:
    bench = Bench(("a", (0, 1)), ("b", (2, 3)))
    bench.submit(0)
    bench.submit(1, described=fingerprint(op=Reduction.MAX))
    bench.now += 0.999
    assert errors(bench.do(TimePassed())) == []
    bench.now += 0.001
    actions = bench.do(TimePassed())
    assert [error.by_rank for error in errors(actions) if isinstance(error, MismatchError)] == [
        {0: "sum", 1: "max"}
    ] * 2
    assert [type(frame) for frame in frames(actions)] == [Abort]


def test_nothing_starts_while_calls_differ() -> None:
    barrier, reduced = fingerprint(kind="barrier", count=0), fingerprint()
    bench = Bench(("a", (0,)), ("b", (1,)), ("c", (2, 3)))
    bench.submit(0, described=barrier)
    assert [type(frame) for frame in frames(bench.frame(Differs(GROUP, 1, "x", 0, (Call(reduced, (2,)),)), "c"))] == [
        Differs,
        Differs,
    ]
    assert bench.frame(ready()) == []
    [error] = errors(bench.frame(Differs(GROUP, 1, "x", 0, (Call(reduced, (2,)), Call(barrier, (3,)))), "c"))
    assert isinstance(error, MismatchError)
    assert (error.field, error.by_rank) == ("kind", {0: "barrier", 1: "barrier", 2: "all_reduce", 3: "barrier"})


def test_a_peer_that_speaks_for_ranks_of_others_ends_the_operation() -> None:
    bench = Bench(("a", (0,)), ("b", (1,)))
    bench.submit(0)
    assert frames(bench.frame(Differs(GROUP, 1, "x", 0, (Call(fingerprint(), (0,)),)))) == []
    bench.now += 1.25
    [word] = frames(bench.do(TimePassed()))
    [error] = errors(bench.frame(word))
    assert isinstance(error, ProtocolError)


def test_a_refused_submit_counts_and_fails_the_operation_on_every_rank() -> None:
    bench = Bench(("a", (0, 1)), ("b", (2,)))
    full = LimitExceeded("4 requests are in flight", limit="limits.requests", hint="wait")
    actions = bench.do(Submitted(1, 9, GROUP, 1, "x", fingerprint(), None, bench.now + 30, 0, full))
    [error] = errors(actions)
    assert isinstance(error, LimitExceeded)
    assert (error.limit, error.hint) == ("limits.requests", "wait")
    assert error.message == (
        "group 'world' of job 'job': 'x' (use 0) of rank 1 on node 'a' was refused: 4 requests are in flight"
    )
    assert frames(actions) == [Abort(GROUP, 1, "x", 0, to_wire(error))]
    assert [str(late) for late in errors(bench.submit(0))] == [str(error)]
    # The next calls meet each other.
    bench.submit(0)
    assert errors(bench.submit(1)) == []
    assert list(bench.engine.snapshot()["groups"][GROUP]["operations"]) != []


def test_a_late_submit_gets_the_recorded_outcome_once() -> None:
    bench = Bench(("a", (0, 1)), ("b", (2,)))
    lost = RankLost("rank 2 is gone", ranks=[2])
    assert bench.frame(Abort(GROUP, 1, "x", 0, to_wire(lost))) == []
    assert [str(error) for error in errors(bench.submit(0))] == ["rank 2 is gone"]
    assert [str(error) for error in errors(bench.submit(1))] == ["rank 2 is gone"]
    assert errors(bench.submit(0)) == []
    assert bench.frame(Abort(GROUP, 1, "x", 0, to_wire(lost))) == []
    assert len(bench.engine.snapshot()["groups"][GROUP]["operations"]) == 1


def test_a_barrier_needs_ready_of_every_member() -> None:
    bench = Bench(("a", (0,)), ("b", (1,)), ("c", (2,)))
    barrier = fingerprint(kind="barrier", count=0)
    assert frames(bench.submit(0, described=barrier)) == [
        Ready(GROUP, 1, "x", 0, 1, barrier, (0, 1, 0), (), 1),
        Ready(GROUP, 1, "x", 0, 1, barrier, (0, 1, 0), (), 1),
    ]
    assert bench.frame(ready(), "b") == []
    deliver, timer = bench.frame(ready(), "c")
    assert timer == SetTimer(bench.now + 5e-3)  # to confirm it
    assert isinstance(deliver, Deliver)
    assert deliver.region is None


def test_frames_of_other_generations_attempts_and_strangers_are_ignored() -> None:
    bench = Bench(("a", (0,)), ("b", (1,)))
    bench.submit(0, described=fingerprint(kind="barrier", count=0))
    assert bench.frame(Ready(GROUP, 0, "x", 0, 1, fingerprint(kind="barrier", count=0), (), ())) == []
    assert bench.frame(ready(), "stranger") == []
    assert bench.frame(ready(attempt=0)) == []
    assert bench.engine.snapshot()["counters"]["frames_ignored"] == 3


def test_frames_may_come_before_their_group() -> None:
    engine = Engine("a", Limits())
    frame = ready()
    assert engine.handle(FrameArrived("b", frame), 1.0) == []
    started = GroupStarted(GROUP, KEY, 1, 1 << 20, (Member("a", 1, (0,)), Member("b", 1, (1,))), 0, {0: 0})
    engine.handle(started, 2.0)
    barrier = fingerprint(kind="barrier", count=0)
    actions = engine.handle(Submitted(0, 1, GROUP, 0, "x", barrier, None, 99.0, 0), 3.0)
    assert [type(action) for action in actions if not isinstance(action, SetTimer)] == [SendFrame, Deliver]


def test_early_frames_are_bounded_in_number_and_age() -> None:
    engine = Engine("a", Limits(early_frames=3))
    for use in range(5):
        engine.handle(FrameArrived("b", ready(use)), 1.0)
    assert engine.snapshot()["outstanding"]["early_frames"] == 3
    started = GroupStarted(GROUP, KEY, 1, 1 << 20, (Member("a", 1, (0,)), Member("b", 1, (1,))), 0, {0: 0})
    engine.handle(started, 32.0)
    assert engine.snapshot()["groups"][GROUP]["operations"] == []


def test_what_cannot_be_served_is_said_at_once() -> None:
    bench = Bench(("a", (0,)), limits=Limits(arena_bytes=1 << 20, names=4))
    cases: list[tuple[Fingerprint, type[AllReducedError], str]] = [
        (fingerprint(algorithm="magic"), InvalidArgument, "there are direct"),
        (fingerprint(kind="dance"), InvalidArgument, "there are all_reduce"),
        (fingerprint(dtype=DType.INT32, op=Reduction.MEAN), InvalidArgument, "mean of int32"),
        (fingerprint(kind="broadcast", root=4), InvalidArgument, "no rank 4"),
        (Fingerprint("all_reduce", 99, 1, "", 4, -1, ""), InvalidArgument, "unknown code 99"),
        (Fingerprint("all_reduce", 1, 99, "", 4, -1, ""), InvalidArgument, "unknown code 99"),
        (Fingerprint("all_reduce", 1, 1, "", -4, -1, ""), InvalidArgument, "-4 elements"),
        (fingerprint(count=1 << 20), LimitExceeded, "does not fit into the 1048576 bytes that node 'a' allows"),
    ]
    for described, kind, text in cases:
        (error,) = errors(bench.submit(0, described=described))
        assert isinstance(error, kind)
        assert text in error.message
    assert bench.engine.snapshot()["groups"][GROUP]["operations"] == []


def test_one_name_too_many_is_refused_with_its_limit() -> None:
    bench = Bench(("a", (0, 1)), ("b", (2,)), limits=Limits(names=2, names_kept=0, operations=3))
    assert errors(bench.submit(0, "x")) + errors(bench.submit(0, "y")) + errors(bench.submit(0, "x")) == []
    for name in ("p", "q", "r"):
        refused = bench.submit(0, name)
        (error,) = errors(refused)
        assert isinstance(error, LimitExceeded)
        assert error.limit == "limits.names"
        assert f"{name!r} is refused, node 'a' has 2 different names" in error.message
        told = [frame for frame in frames(refused) if isinstance(frame, Abort)]
        assert [(frame.name, frame.use, frame.error, frame.final) for frame in told] == [
            (name, 0, to_wire(error), True)
        ]
        (other,) = errors(bench.submit(1, name))
        assert other.message == error.message
    last = bench.submit(0, "s")  # so many calls that make no sense are not worth their memory
    assert len(errors(last)) == 1
    assert not frames(last)


def test_names_that_are_used_one_after_the_other_are_never_too_many() -> None:
    bench = Bench(("a", (0,)), ("b", (1,)), limits=Limits(names=1, names_kept=4))
    barrier, rounds = fingerprint(kind="barrier", count=0), 0
    for use in range(40):
        said = bench.submit(0, f"n{use}", barrier)
        said += bench.frame(ready(0, f"n{use}"))
        said += bench.frame(Confirm(GROUP, 1, (use + 1,), everything=False))
        assert errors(said) == []
        for frame in frames(said):
            if isinstance(frame, Forget):
                rounds += 1
                assert errors(bench.frame(Forgettable(GROUP, 1, frame.round, ()))) == []
    assert rounds > 4


def test_the_engine_is_idle_once_nothing_of_a_local_rank_is_under_way() -> None:
    bench = Bench(("a", (0,)), ("b", (1,)))
    barrier = fingerprint(kind="barrier", count=0)
    idle = [bench.engine.idle]
    bench.frame(Arrived(GROUP, 1, "theirs", 0, (1,)))
    idle.append(bench.engine.idle)  # nobody here has called it
    bench.submit(0, described=barrier)
    idle.append(bench.engine.idle)
    bench.frame(ready(described=barrier))
    idle.append(bench.engine.idle)  # the other node may need it from here
    bench.frame(Confirm(GROUP, 1, (1,), False))
    idle.append(bench.engine.idle)
    bench.submit(0, "lost", barrier)
    idle.append(bench.engine.idle)
    bench.do(GroupBroken(GROUP, RankLost("gone", ranks=(1,), nodes=("b",))))
    idle.append(bench.engine.idle)
    assert idle == [True, True, False, False, True, False, True]


def test_a_source_of_another_size_is_refused() -> None:
    bench = Bench(("a", (0,)))
    actions = bench.do(Submitted(0, 1, GROUP, 0, "x", fingerprint(), Region(0, 0, 399), 130.0, 0))
    (error,) = errors(actions)
    assert error.message.endswith("rank 0 gave 399 bytes to 'x' (use 0), which needs 400")


def test_submits_where_nobody_may() -> None:
    bench = Bench(("a", (0,)))
    stranger = Submitted(9, 1, GROUP, 0, "x", fingerprint(), Region(0, 0, 400), 130.0, 0)
    nowhere = Submitted(0, 2, 77, 0, "x", fingerprint(), Region(0, 0, 400), 130.0, 0)
    assert [type(error) for event in (stranger, nowhere) for error in errors(bench.do(event))] == [ClosedError] * 2


def test_too_many_operations_at_once() -> None:
    bench = Bench(("a", (0, 1)), limits=Limits(operations=2))
    assert errors(bench.submit(0)) + errors(bench.submit(0)) == []
    (error,) = errors(bench.submit(0))
    assert isinstance(error, LimitExceeded)
    assert error.limit == "limits.operations"
    assert [type(error) for error in errors(bench.submit(1)) + errors(bench.submit(1))] == []
    assert [type(error) for error in errors(bench.submit(1))] == [LimitExceeded]


def test_a_deadline_names_who_is_missing_exactly() -> None:
    bench = Bench(("a", (0, 3)), ("b", (1, 4)), ("c", (2,)))
    assert SetTimer(101.0) in bench.submit(3, deadline=5.0)
    bench.now = 101.0
    asked = bench.do(TimePassed())
    assert frames(asked) == [Arrived(GROUP, 1, "x", 0, (3,))] * 2
    assert SetTimer(105.0) in asked
    assert bench.frame(Arrived(GROUP, 1, "x", 0, (4,)), "b") == []
    assert bench.frame(Queued(GROUP, 1, "x", 0, ()), "c") == []
    bench.now = 105.0
    actions = bench.do(TimePassed())
    (error,) = errors(actions)
    assert isinstance(error, DeadlineExceeded)
    assert error.missing == (0, 1)
    assert error.message == (
        "group 'world' of job 'job': 'x' (use 0) did not end within 5 s: "
        "rank 0 on node 'a' and rank 1 on node 'b' did not call it"
    )
    assert len(frames(actions)) == 2


def test_a_deadline_that_has_passed_before_its_submit_is_no_negative_time() -> None:
    bench = Bench(("a", (0, 1)))
    actions = [*bench.submit(0, deadline=-0.001), *bench.do(TimePassed())]
    (error,) = errors(actions)
    assert "'x' (use 0) did not end within 0 s: rank 1 on node 'a' did not call it" in error.message


def test_a_deadline_with_everybody_there_names_the_node() -> None:
    bench = Bench(("a", (0,)), ("b", (1,)))
    bench.submit(0, deadline=5.0)
    bench.frame(Queued(GROUP, 1, "x", 0, ()))
    bench.now = 105.0
    (word,) = frames(bench.do(TimePassed()))
    assert isinstance(word, Abort)
    (error,) = errors(bench.frame(replace(word, final=True)))
    assert isinstance(error, DeadlineExceeded)
    assert error.missing == ()
    assert "all ranks called it, but node 'b' did not deliver" in error.message


def test_who_is_asked_answers_once() -> None:
    bench = Bench(("a", (0, 1)), ("b", (2, 3)))
    bench.submit(0)
    ask = Arrived(GROUP, 1, "x", 0, (2,))
    assert frames(bench.frame(ask)) == [Arrived(GROUP, 1, "x", 0, (0,))]
    assert frames(bench.frame(ask)) == []


def test_a_rank_that_left_is_missed_at_once_and_later() -> None:
    bench = Bench(("a", (0,)), ("b", (1,)))
    bench.submit(0)
    (error,) = errors(bench.do(RanksLeft(GROUP, (1,))))
    assert isinstance(error, RankLost)
    assert (error.ranks, error.nodes) == ((1,), ("b",))
    assert [type(error) for error in errors(bench.submit(0))] == [RankLost]


def test_a_broken_group_ends_everything_with_its_error() -> None:
    bench = Bench(("a", (0,)), ("b", (1,)))
    bench.submit(0)
    broken = RankLost("rank 1 was killed", ranks=[1])
    actions = bench.do(GroupBroken(GROUP, broken))
    assert errors(actions) == [broken]
    assert frames(actions) == []
    assert errors(bench.submit(0, "y")) == [broken]
