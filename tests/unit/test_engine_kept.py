"""Results that are kept until all members confirmed them, and deliveries that wait for signs of life."""

from __future__ import annotations

from math import inf

import pytest
from tests.simulation.cluster import fingerprint

from allreduced.core.errors import PeerLost
from allreduced.core.identity import GroupKey, Member
from allreduced.daemon.engine import kept
from allreduced.daemon.engine.actions import (
    Action,
    CreateArena,
    Deliver,
    PostReceive,
    Reduce,
    Send,
    SendFrame,
    SetTimer,
)
from allreduced.daemon.engine.engine import Engine
from allreduced.daemon.engine.events import (
    ArenaReady,
    Event,
    FrameArrived,
    GroupBroken,
    GroupForgotten,
    GroupStarted,
    Heard,
    NodeDeparted,
    Received,
    Reduced,
    Sent,
    Submitted,
    TimePassed,
)
from allreduced.daemon.engine.freshness import fresh_until
from allreduced.daemon.engine.limits import Limits
from allreduced.daemon.engine.region import Region
from allreduced.protocol.peer import Confirm, EngineFrame, Fingerprint, Grant, Queued, Ready, Withdraw, Withdrawn

BARRIER = fingerprint(kind="barrier", count=0)
CALL = fingerprint(count=256)
TAG = 1 << 32 | 1


class Bench:
    """Node ``a`` (rank 0) of a group of nodes with one rank each; arenas are ready at once."""

    def __init__(self, nodes: str = "ab", limits: Limits | None = None) -> None:
        self.engine = Engine("a", limits or Limits(inline_bytes=0, window_tiles=8))
        self.now = 100.0
        self.requests = 0
        members = tuple(Member(node, 1, (rank,)) for rank, node in enumerate(nodes))
        self.do(GroupStarted(1, GroupKey(1, "j", "w"), 1, 64, members, 0, {0: 10}))

    def do(self, event: Event) -> list[Action]:
        """Return the actions, those that follow from ready arenas included."""
        actions = self.engine.handle(event, self.now)
        for action in list(actions):
            if isinstance(action, CreateArena):
                actions += self.do(ArenaReady(action.buffer))
        return [action for action in actions if not isinstance(action, CreateArena)]

    def submit(self, name: str, described: Fingerprint = BARRIER) -> list[Action]:
        """Call an operation."""
        self.requests += 1
        source = Region(1, 0, 4 * described.count) if described.count else None
        return self.do(Submitted(10, self.requests, 1, 0, name, described, source, self.now + 60.0, 0))

    def frame(self, frame: EngineFrame, node: str = "b") -> list[Action]:
        """Let a peer send a frame."""
        return self.do(FrameArrived(node, frame))

    def ready(self, name: str, serial: int, confirms: tuple[int, ...] = (), node: str = "b") -> list[Action]:
        """Let a peer be ready for a barrier."""
        return self.frame(Ready(1, 1, name, 0, 1, BARRIER, (), (), serial, confirms), node)

    def reduced(self, name: str) -> int:
        """Let an operation of 1 KiB end well here and be sent; its serial is the count of calls."""
        posted = [action.receive for action in self.submit(name, CALL) if isinstance(action, PostReceive)]
        grants = (Grant(7, 0, 1, 0, 8, b"seven"), Grant(8, 1, 0, 0, 8, b"eight"))
        actions = self.frame(Ready(1, 1, name, 0, 1, CALL, (), grants, 50 + self.requests))
        for receive in posted:
            actions += self.do(Received(receive, 0, 512, TAG))
        count = 0
        while count < len(actions):
            action = actions[count]
            if isinstance(action, Reduce):
                actions += self.do(Reduced(action.job))
            elif isinstance(action, Send):
                actions += self.do(Sent(action.send))
            count += 1
        return len([action for action in actions if isinstance(action, Deliver)])

    @property
    def reserved(self) -> int:
        """Bytes reserved."""
        return self.engine.snapshot()["memory"]["reserved_bytes"]


def frames(actions: list[Action]) -> list[tuple[str, EngineFrame]]:
    return [(action.node, action.frame) for action in actions if isinstance(action, SendFrame)]


def delivered(actions: list[Action]) -> list[int]:
    return [action.request for action in actions if isinstance(action, Deliver)]


def test_a_result_is_confirmed_by_the_next_ready() -> None:
    bench = Bench("abc")
    bench.submit("x")
    bench.ready("x", 7, node="b")
    assert delivered(bench.ready("x", 9, node="c")) == [1]
    stamp = (0, 2, 0)
    assert frames(bench.submit("y")) == [
        ("b", Ready(1, 1, "y", 0, 1, BARRIER, stamp, (), 2, (7,))),
        ("c", Ready(1, 1, "y", 0, 1, BARRIER, stamp, (), 2, (9,))),
    ]
    bench.now += 0.5
    assert frames(bench.do(TimePassed())) == []


def test_a_result_is_confirmed_in_a_while_where_no_ready_goes() -> None:
    bench = Bench("abc")
    bench.submit("x")
    bench.ready("x", 7, node="b")
    assert SetTimer(100.005) in bench.ready("x", 9, node="c")
    bench.now = 100.005
    assert frames(bench.do(TimePassed())) == [("b", Confirm(1, 1, (7,), False)), ("c", Confirm(1, 1, (9,), False))]


def test_who_waits_for_memory_is_told_at_once() -> None:
    bench = Bench()
    bench.submit("x")
    bench.ready("x", 7)
    assert frames(bench.frame(Queued(1, 1, "y", 0, ()))) == [("b", Confirm(1, 1, (7,), False))]


def test_memory_is_kept_until_all_members_confirmed() -> None:
    bench = Bench()
    assert bench.reduced("x") == 1
    assert bench.reserved == 1024  # windows are free; the client has its lease
    (lease,) = bench.engine.snapshot()["leases"].values()
    assert lease == {"leases": 1, "bytes": 1024}
    bench.frame(Confirm(1, 1, (2,), False))  # of something else
    assert bench.engine.snapshot()["groups"][1]["ending"] == 1
    bench.frame(Confirm(1, 1, (1,), False))
    assert bench.engine.snapshot()["groups"][1]["ending"] == 0


def test_a_confirmation_may_come_before_the_own_delivery() -> None:
    bench = Bench("abc")
    bench.submit("x")
    bench.ready("x", 7, node="b")
    bench.frame(Confirm(1, 1, (1,), False), "b")
    bench.frame(Confirm(1, 1, (1,), False), "c")
    assert delivered(bench.ready("x", 9, node="c")) == [1]
    assert bench.engine.snapshot()["groups"][1]["ending"] == 0


@pytest.mark.parametrize("end", [NodeDeparted(1, "b"), GroupBroken(1, PeerLost("gone", nodes=["b"]))])
def test_nothing_is_kept_for_members_that_are_gone(end: Event) -> None:
    bench = Bench()
    bench.reduced("x")
    bench.do(end)
    assert bench.engine.snapshot()["groups"][1]["ending"] == 0


def test_a_group_that_is_forgotten_confirms_and_keeps_nothing() -> None:
    bench = Bench()
    bench.submit("x")
    bench.ready("x", 7)
    # Its confirmation may never come: who would send it may have forgotten the group as well.
    assert frames(bench.do(GroupForgotten(1))) == [("b", Confirm(1, 1, (7,), False))]
    assert bench.engine.snapshot()["groups"] == {}


def test_no_more_is_ready_than_a_list_of_results_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_RESULTS", 2)
    bench = Bench()
    for serial, name in enumerate("xy", 1):
        bench.submit(name)
        assert delivered(bench.ready(name, serial)) == [serial]
    assert frames(bench.submit("z")) == [("b", Queued(1, 1, "z", 0, (0, 3, 0)))]
    ((node, frame),) = frames(bench.frame(Confirm(1, 1, (2,), False)))
    assert isinstance(frame, Ready)
    assert (node, frame.name, frame.serial) == ("b", "z", 3)


def test_what_is_ready_makes_room_for_what_all_have_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_RESULTS", 1)
    bench = Bench()
    bench.submit("late")
    bench.submit("x")
    assert frames(bench.ready("x", 1)) == [("b", Withdraw(1, 1, "late", 0, 1))]
    [(_, frame)] = frames(bench.frame(Withdrawn(1, 1, "late", 0, 1, True)))
    assert isinstance(frame, Ready)
    assert (frame.name, frame.serial) == ("x", 2)


def test_until_when_a_quorum_is_fresh() -> None:
    assert fresh_until(0, [0.0], set(), 5.0) == inf
    assert fresh_until(0, [0.0, 7.0], set(), 5.0) == inf  # half with the lowest rank
    assert fresh_until(1, [7.0, 0.0], set(), 5.0) == 12.0
    assert fresh_until(1, [7.0, 0.0], {0}, 5.0) == inf
    assert fresh_until(0, [0.0, 1.0, 9.0], set(), 5.0) == 14.0
    assert fresh_until(0, [0.0, 1.0, 9.0, 4.0, 3.0], set(), 5.0) == 9.0
    assert fresh_until(1, [-inf, 0.0], set(), 5.0) == -inf


def test_a_result_waits_for_a_sign_of_life_of_a_quorum() -> None:
    bench = Bench("abc")
    bench.now = 102.0
    bench.submit("x")
    bench.ready("x", 7, node="b")
    bench.now = 104.0
    bench.do(Heard(("stranger",)))
    bench.now = 106.0
    bench.do(Heard(("stranger",)))
    bench.now = 107.001
    # c answers what was asked: it is alive, and with it there is a quorum
    assert delivered(bench.ready("x", 9, node="c")) == [1]


def test_what_is_read_after_a_stall_is_no_sign_of_life() -> None:
    bench = Bench("abc")
    bench.submit("x")
    bench.now = 103.0
    bench.ready("x", 7, node="b")
    assert delivered(bench.ready("x", 9, node="c")) == []
    assert bench.engine.snapshot()["counters"]["stalls"] == 1
    bench.now = 103.3
    assert delivered(bench.do(Heard(("b", "c")))) == []
    bench.now = 103.32
    assert delivered(bench.do(Heard(("b",)))) == [1]
