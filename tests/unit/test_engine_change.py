"""The end of a generation: what a member tells of it, and what it does when the others have agreed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.test_engine_kept import BARRIER, CALL, TAG, Bench, delivered, frames

from allreduced.core.errors import (
    AllReducedError,
    DeadlineExceeded,
    GroupChanged,
    PeerLost,
    ProtocolError,
    RankLost,
    to_wire,
)
from allreduced.core.identity import Member
from allreduced.daemon.engine.actions import (
    Action,
    CancelReceive,
    CancelSend,
    Fail,
    Frozen,
    GiveUp,
    PostReceive,
    Send,
)
from allreduced.daemon.engine.events import (
    Changed,
    Freeze,
    GroupBroken,
    GroupForgotten,
    Heard,
    ReceiveCancelled,
    Received,
    Sent,
    TimePassed,
)
from allreduced.daemon.losses import error_of
from allreduced.protocol.change import Change, Failure, Loss, Result
from allreduced.protocol.peer import Abort, Confirm, Fetch, Grant, Kept, Ready

LOSS = Loss("c", (2,), True, True, to_wire(PeerLost("node 'c' died")))
STAMP = (0, 1, 0)


def _change(
    nodes: str = "ab",
    results: tuple[Result, ...] = (),
    failures: tuple[Failure, ...] = (),
    *,
    losses: tuple[Loss, ...] = (),
    ended: bool = False,
    generation: int = 1,
) -> Changed:
    members = tuple(Member(node, 1, (ord(node) - ord("a"),)) for node in nodes)
    change = Change(generation + 1, members, losses, ended, (), results, failures, 0, ())
    return Changed(1, generation, change)


def _errors(actions: list[Action]) -> list[AllReducedError]:
    return [action.error for action in actions if isinstance(action, Fail)]


def _of(actions: list[Action], kind: type) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def test_a_frozen_generation_delivers_and_fails_nothing() -> None:
    bench = Bench()
    bench.submit("old")
    bench.ready("old", 1)
    bench.submit("bad")
    bench.frame(Abort(1, 1, "bad", 0, to_wire(ProtocolError("no"))))
    bench.frame(Abort(1, 1, "bad", 0, to_wire(ProtocolError("no")), final=True))
    bench.submit("x")
    frozen = Frozen(1, 1, (Result("old", 0, (0,)),), (Failure("bad", 0, to_wire(ProtocolError("no"))),), 0, ())
    assert bench.do(Freeze(1, 1)) == [frozen]
    assert delivered(bench.ready("x", 3)) == []
    bench.submit("y")
    assert _errors(bench.frame(Abort(1, 1, "y", 0, to_wire(ProtocolError("no")), final=True))) == []
    assert bench.do(Freeze(1, 1)) == [frozen]
    assert bench.do(Freeze(1, 2)) == []


def test_what_is_complete_here_and_delivered_elsewhere_is_delivered() -> None:
    bench = Bench()
    bench.submit("x")
    bench.do(Freeze(1, 1))
    bench.ready("x", 3)
    actions = bench.do(_change(results=(Result("x", 0, (1,)),)))
    assert delivered(actions) == [1]
    assert frames(actions) == [("b", Confirm(1, 2, (), True))]
    assert bench.engine.snapshot()["groups"][1]["ending"] == 1
    bench.frame(Confirm(1, 2, (), True))
    assert bench.engine.snapshot()["groups"][1]["ending"] == 0


def test_a_result_that_is_missing_is_fetched_when_its_memory_is_at_rest() -> None:
    bench = Bench("abc")
    posted = [action.receive for action in bench.submit("x", CALL) if isinstance(action, PostReceive)]
    bench.do(Freeze(1, 1))
    actions = bench.do(_change("abc", results=(Result("x", 0, (2,)),)))
    assert [action.receive for action in actions if isinstance(action, CancelReceive)] == posted
    assert frames(actions) == []
    for receive in posted[:-1]:
        assert bench.do(ReceiveCancelled(receive)) == []
    actions = bench.do(ReceiveCancelled(posted[-1]))
    (post,) = _of(actions, PostReceive)
    assert isinstance(post, PostReceive)
    assert (post.node, post.region.nbytes) == ("c", 1024)
    assert frames(actions) == [("c", Fetch(1, 2, "x", 0, (Grant(post.receive, 0, 0, 0, 1, b""),)))]
    assert bench.do(Received(post.receive, 512, 512, 2 << 32)) == []
    actions = bench.do(Received(post.receive, 0, 512, 2 << 32))
    assert delivered(actions) == [1]
    assert frames(actions) == [(node, Confirm(1, 2, (), True)) for node in "bc"]


def test_a_kept_result_is_given_to_who_asks() -> None:
    bench = Bench()
    bench.reduced("x")
    fetch = Fetch(1, 2, "x", 0, (Grant(77, 0, 0, 0, 1, b"token"),))
    assert bench.frame(fetch) == []  # of a generation to come
    bench.do(Freeze(1, 1))
    actions = bench.do(_change(results=(Result("x", 0, (0,)),)))
    (send,) = _of(actions, Send)
    assert isinstance(send, Send)
    assert (send.node, send.token, send.offset, send.region.nbytes, send.tag) == ("b", b"token", 0, 1024, 2 << 32)
    assert bench.frame(fetch) == []  # once at a time
    bench.do(Sent(send.send))
    assert _of(bench.frame(fetch), Send) != []


def test_a_holder_that_dies_is_replaced_by_the_next_change() -> None:
    bench = Bench("abc")
    posted = [action.receive for action in bench.submit("x", CALL) if isinstance(action, PostReceive)]
    bench.do(_change("abc", results=(Result("x", 0, (2,)),)))
    actions = [action for receive in posted for action in bench.do(ReceiveCancelled(receive))]
    (post,) = _of(actions, PostReceive)
    assert isinstance(post, PostReceive)
    bench.do(Freeze(1, 2))
    actions = bench.do(_change("ab", results=(Result("x", 0, (1,)),), losses=(LOSS,), ended=True, generation=2))
    assert _of(actions, CancelReceive) == [CancelReceive(post.receive, "c")]
    actions = bench.do(ReceiveCancelled(post.receive))
    ((node, frame),) = frames(actions)
    assert (node, type(frame)) == ("b", Fetch)
    (post,) = _of(actions, PostReceive)
    assert isinstance(post, PostReceive)
    assert delivered(bench.do(Received(post.receive, 0, 1024, 3 << 32))) == [1]
    assert [str(error) for error in _errors(bench.submit("y"))] == [str(error_of((LOSS,)))]


def test_an_agreed_result_that_does_not_come_takes_this_member_out() -> None:
    bench = Bench()
    posted = [action.receive for action in bench.submit("x", CALL) if isinstance(action, PostReceive)]
    bench.do(_change(results=(Result("x", 0, (1,)),)))
    for receive in posted:
        bench.do(ReceiveCancelled(receive))
    bench.frame(Abort(1, 2, "x", 0, to_wire(ProtocolError("no")), final=True))
    gave_up: list[Action] = []
    while bench.now < 165.0:
        bench.now += 1.0
        bench.do(Heard(("b",)))
        gave_up = _of(bench.do(TimePassed()), GiveUp)
    assert len(gave_up) == 1


def test_what_failed_anywhere_fails_with_its_error() -> None:
    bench = Bench()
    bench.submit("x")
    bench.do(Freeze(1, 1))
    failure = Failure("x", 0, to_wire(DeadlineExceeded("late", missing=[1])))
    (error,) = _errors(bench.do(_change(failures=(failure,))))
    assert isinstance(error, DeadlineExceeded)
    assert error.missing == (1,)


def test_where_nobody_is_lost_everything_else_starts_again_from_its_inputs() -> None:
    bench = Bench()
    posted = [action.receive for action in bench.submit("x", CALL) if isinstance(action, PostReceive)]
    grants = (Grant(7, 0, 1, 0, 8, b"seven"), Grant(8, 1, 0, 0, 8, b"eight"))
    (send,) = bench.frame(Ready(1, 1, "x", 0, 1, CALL, (), grants, 1))
    assert isinstance(send, Send)
    again = Ready(1, 2, "x", 0, 1, CALL, (), grants, 1)
    assert bench.frame(again) == []  # early: b has the change already
    actions = bench.do(_change())
    assert actions == [*(CancelReceive(receive, "b") for receive in posted), CancelSend(send.send, "b")]
    for receive in posted:
        assert bench.do(ReceiveCancelled(receive)) == []
    actions = bench.do(Sent(send.send))
    assert len(_of(actions, PostReceive)) == 2
    ((_, ready),) = frames(actions)
    assert isinstance(ready, Ready)
    assert (ready.generation, ready.attempt, ready.serial, ready.stamp) == (2, 1, 2, STAMP)
    (send,) = _of(actions, Send)
    assert isinstance(send, Send)
    assert send.tag == 2 << 32 | 1


def test_what_waits_for_a_rank_goes_on_waiting() -> None:
    bench = Bench()
    bench.frame(Ready(1, 1, "x", 0, 1, BARRIER, (), (), 1))
    assert bench.do(_change()) == []
    assert delivered(bench.submit("x")) == []
    assert delivered(bench.frame(Ready(1, 1, "x", 0, 1, BARRIER, (), (), 1))) == []  # late, of a dead generation
    assert delivered(bench.frame(Ready(1, 2, "x", 0, 1, BARRIER, (), (), 2))) == [1]


def test_a_deadline_that_passed_meanwhile_holds_afterwards() -> None:
    bench = Bench()
    bench.submit("x")
    bench.do(Freeze(1, 1))
    while bench.now < 161.0:
        bench.now += 1.0
        bench.do(Heard(("b",)))
    assert _errors(bench.do(TimePassed())) == []
    actions = bench.do(_change())
    (error,) = _errors(actions)
    assert isinstance(error, DeadlineExceeded)
    assert frames(actions) == [("b", Abort(1, 2, "x", 0, to_wire(error), True))]


@pytest.mark.parametrize(
    ("loss", "kind"),
    [(LOSS, PeerLost), (replace(LOSS, whole=False, error=to_wire(RankLost("rank 2 was killed"))), RankLost)],
)
def test_a_loss_ends_the_group_with_one_error(loss: Loss, kind: type[AllReducedError]) -> None:
    bench = Bench("abc")
    bench.submit("x")
    bench.do(Freeze(1, 1))
    (error,) = _errors(bench.do(_change("ab", losses=(loss,), ended=True)))
    assert isinstance(error, kind)
    assert isinstance(error, PeerLost | RankLost)
    assert (error.nodes, error.ranks) == (("c",), (2,))
    assert _errors(bench.submit("y")) == [error]


def test_a_result_that_the_others_did_not_keep_has_diverged() -> None:
    bench = Bench("abc")
    bench.submit("x")
    bench.ready("x", 1, node="b")
    assert delivered(bench.ready("x", 1, node="c")) == [1]
    bench.submit("y")
    cut_off = PeerLost("no quorum", nodes=["b", "c"])
    assert _errors(bench.do(GroupBroken(1, cut_off))) == [cut_off]
    loss = Loss("a", (0,), True, False, to_wire(PeerLost("node 'a' is silent")))
    (action,) = bench.do(_change("bc", losses=(loss,), ended=True))
    assert isinstance(action, GiveUp)
    assert isinstance(action.error, GroupChanged)
    assert action.error.diverged
    assert "'x' (use 0)" in action.error.message
    assert _errors(bench.submit("z")) == [action.error]


def test_a_member_that_is_left_out_has_not_diverged_where_the_others_have_its_results() -> None:
    bench = Bench("abc")
    for name in "xy":
        bench.submit(name)
        bench.ready(name, 1, node="b")
        bench.ready(name, 1, node="c")
    bench.frame(Confirm(1, 1, (1,), False), "b")
    bench.submit("z")
    loss = Loss("a", (0,), True, False, to_wire(PeerLost("node 'a' is silent")))
    actions = bench.do(_change("bc", (Result("y", 0, (1,)),), losses=(loss,), ended=True))
    (error,) = _errors(actions)
    assert _of(actions, GiveUp) == []
    assert isinstance(error, PeerLost)
    assert error.nodes == ("a",)


def test_a_change_that_is_known_or_came_too_early_changes_nothing_or_ends_the_group_here() -> None:
    bench = Bench()
    bench.do(_change())
    bench.submit("x")
    assert bench.do(_change(losses=(LOSS,), ended=True)) == []
    assert len(_errors(bench.do(_change(losses=(LOSS,), ended=True, generation=5)))) == 1


def test_the_last_member_goes_on_alone() -> None:
    bench = Bench("ac")
    bench.submit("x")
    bench.do(Freeze(1, 1))
    bench.ready("x", 1, node="c")
    assert delivered(bench.do(_change("a", (Result("x", 0, (0, 1)),), losses=(LOSS,), ended=True))) == [1]
    bench.do(GroupForgotten(1))
    assert bench.engine.snapshot()["groups"] == {}


def test_last_words_of_a_dead_generation_do_not_count() -> None:
    bench = Bench()
    bench.submit("x")
    bench.frame(Abort(1, 1, "x", 0, to_wire(ProtocolError("no"))))  # both have said it
    bench.submit("y")
    bench.do(_change())
    assert bench.frame(Kept(1, 1, "y", 0)) == []
    assert bench.frame(Abort(1, 1, "y", 0, to_wire(ProtocolError("no")))) == []
    assert delivered(bench.frame(Ready(1, 2, "y", 0, 1, BARRIER, (), (), 5))) == [2]


def test_data_that_was_not_asked_for_so_takes_this_member_out() -> None:
    bench = Bench()
    posted = [action.receive for action in bench.submit("x", CALL) if isinstance(action, PostReceive)]
    bench.do(_change(results=(Result("x", 0, (1,)),)))
    actions = [action for receive in posted for action in bench.do(ReceiveCancelled(receive))]
    (post,) = _of(actions, PostReceive)
    assert isinstance(post, PostReceive)
    assert len(_of(bench.do(Received(post.receive, 0, 512, TAG)), GiveUp)) == 1
