"""One outcome for each operation: last words, and what they lead to."""

from __future__ import annotations

import pytest
from tests.unit.test_engine_kept import BARRIER, CALL, TAG, Bench, delivered, frames

from allreduced.core.errors import AllReducedError, PeerLost, ProtocolError, RankLost, to_wire
from allreduced.daemon.engine.actions import Action, CancelReceive, Fail, GiveUp, PostReceive, SetTimer
from allreduced.daemon.engine.events import Heard, NodeDeparted, RanksLeft, Received, TimePassed
from allreduced.daemon.engine.verdict import chosen
from allreduced.protocol.peer import Abort, Arrived, Grant, Kept, Queued, Ready

NO = ProtocolError("no")
OTHER = ProtocolError("other")


def _abort(error: AllReducedError = NO, *, final: bool = False, name: str = "x") -> Abort:
    return Abort(1, 1, name, 0, to_wire(error), final)


def _errors(actions: list[Action]) -> list[str]:
    return [str(action.error) for action in actions if isinstance(action, Fail)]


def _overdue(bench: Bench, at: float) -> list[Action]:
    """Let time pass until ``at``, with signs of life on the way."""
    while bench.now < at:
        bench.now = min(at, bench.now + 2.0)
        bench.do(Heard(("b", "c")))
    return bench.do(TimePassed())


def test_the_error_is_that_of_the_lowest_member() -> None:
    assert chosen({2: NO, 1: OTHER}) is OTHER


def test_before_its_ready_is_out_a_member_fails_at_once() -> None:
    bench = Bench("abc")
    actions = bench.frame(_abort(), "b")
    assert frames(actions) == [("b", _abort(final=True)), ("c", _abort(final=True))]
    assert _errors(bench.submit("x")) == ["no"]
    assert frames(bench.frame(_abort(), "c")) == [("c", _abort(final=True))]


def test_a_final_word_fails_at_once() -> None:
    bench = Bench("abc")
    bench.submit("x")
    actions = bench.frame(_abort(final=True), "c")
    assert (_errors(actions), frames(actions)) == (["no"], [])


def test_it_fails_when_all_have_said_so_with_one_error() -> None:
    bench = Bench("abc")
    bench.submit("x")
    actions = bench.frame(_abort(OTHER), "c")
    assert _errors(actions) == []
    assert frames(actions) == [("b", _abort(OTHER)), ("c", _abort(OTHER))]
    assert delivered(bench.ready("x", 1, node="b")) == []
    assert delivered(bench.ready("x", 2, node="c")) == []
    # All members choose among the same words: this one's is an echo of c's and counts as its own.
    assert _errors(bench.frame(_abort(NO), "b")) == ["other"]


def test_who_has_delivered_says_so_once() -> None:
    bench = Bench("abc")
    bench.submit("x")
    bench.ready("x", 1, node="b")
    assert delivered(bench.ready("x", 2, node="c")) == [1]
    kept = Kept(1, 1, "x", 0)
    assert frames(bench.frame(_abort(), "b")) == [("b", kept), ("c", kept)]
    assert frames(bench.frame(_abort(), "c")) == []


def test_where_one_has_delivered_all_do() -> None:
    bench = Bench("abc")
    bench.submit("x")
    bench.ready("x", 1, node="b")
    bench.frame(_abort(), "b")
    assert delivered(bench.ready("x", 2, node="c")) == []
    assert delivered(bench.frame(Kept(1, 1, "x", 0), "c")) == [1]


def test_what_another_one_delivered_does_not_fail_any_more() -> None:
    bench = Bench("abc")
    bench.submit("x")
    bench.frame(Kept(1, 1, "x", 0), "c")
    assert _errors(_overdue(bench, 160.0)) == []
    bench.ready("x", 1, node="b")
    assert delivered(bench.ready("x", 2, node="c")) == [1]


def test_a_deadline_asks_the_others_and_gives_up_when_they_stay_silent() -> None:
    bench = Bench("abc")
    bench.submit("x")
    actions = _overdue(bench, 160.0)
    ((_, word), _) = frames(actions)
    assert isinstance(word, Abort)
    assert not word.final
    assert _errors(actions) == []
    assert SetTimer(165.0) in actions
    (action,) = [action for action in _overdue(bench, 165.0) if isinstance(action, GiveUp)]
    assert action.group == 1
    assert isinstance(action.error, PeerLost)
    assert action.error.nodes == ("a",)
    assert "it was to fail: group 'w' of job 'j': 'x' (use 0) did not end within 60 s" in action.error.message


@pytest.mark.parametrize(
    "frame",
    [
        Ready(1, 1, "x", 0, 1, BARRIER, (), (), 9),
        Queued(1, 1, "x", 0, ()),
        Arrived(1, 1, "x", 0, (1,)),
        _abort(OTHER),
    ],
)
def test_who_does_not_know_that_it_failed_is_told(frame: Ready | Queued | Arrived | Abort) -> None:
    bench = Bench("abc")
    bench.submit("x")
    bench.frame(_abort(final=True), "c")
    assert frames(bench.frame(frame, "b")) == [("b", _abort(final=True))]
    assert bench.frame(_abort(OTHER, final=True), "b") == []
    assert bench.frame(Kept(1, 1, "x", 0), "b") == []


def test_a_confirmation_in_a_ready_counts_although_its_operation_failed() -> None:
    bench = Bench()
    bench.submit("x")
    bench.ready("x", 1)
    bench.frame(_abort(name="y", final=True))
    bench.submit("y")
    bench.ready("y", 2, (1,))
    assert bench.engine.snapshot()["groups"][1]["ending"] == 0


def test_a_spoiled_operation_that_another_one_delivered_takes_this_member_out() -> None:
    bench = Bench()
    posted = [action.receive for action in bench.submit("x", CALL) if isinstance(action, PostReceive)]
    grants = (Grant(7, 0, 1, 0, 8, b"seven"), Grant(8, 1, 0, 0, 8, b"eight"))
    bench.frame(Ready(1, 1, "x", 0, 1, CALL, (), grants, 1))
    cancels = bench.do(Received(posted[0], 0, 5000, TAG))
    assert [type(action) for action in cancels] == [CancelReceive] * 2
    (action,) = bench.frame(Kept(1, 1, "x", 0))
    assert isinstance(action, GiveUp)
    assert "sent 5000 bytes at 0 of a receive of 512 bytes" in action.error.message


def test_what_needs_more_of_an_agent_that_stopped_fails() -> None:
    bench = Bench("abc")
    bench.submit("x")
    bench.ready("x", 1, node="b")
    bench.frame(Queued(1, 1, "x", 0, ()), "c")
    bench.ready("y", 2, node="c")
    bench.do(RanksLeft(1, (2,)))
    actions = bench.do(NodeDeparted(1, "c"))
    # What nobody can have completed without this member fails at once.
    assert [(frame.name, frame.final) for _, frame in frames(actions) if isinstance(frame, Abort)] == [
        ("y", True),
        ("y", True),
    ]
    left = "group 'w' of job 'j': the agent of 'c' stopped before"
    hint = "(stop an agent when its ranks have closed their communicators)"
    assert _errors(bench.submit("y")) == [f"{left} 'y' (use 0) was complete {hint}"]
    assert _errors(_overdue(bench, bench.now + 1.25)) == []
    # The word of the one that stopped is not waited for.
    assert _errors(bench.frame(_abort(), "b")) == [f"{left} 'x' (use 0) was complete {hint}"]
    bench.ready("z", 3, node="b")
    assert [type(action.error) for action in bench.submit("z") if isinstance(action, Fail)] == [RankLost]
