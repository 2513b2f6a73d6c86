"""Memory under pressure: one agreed order, READY taken back, and no deadlock whatever the order of the calls."""

from __future__ import annotations

import pytest
from tests.simulation.cluster import Call, Cluster, Request, fingerprint
from tests.simulation.workload import random_data

from allreduced.core.dtypes import DType
from allreduced.core.errors import LimitExceeded, PeerLost
from allreduced.core.identity import GroupKey, Member
from allreduced.daemon.engine.actions import (
    Action,
    CancelReceive,
    CreateArena,
    DestroyArena,
    Fail,
    PostReceive,
    SendFrame,
)
from allreduced.daemon.engine.engine import Engine
from allreduced.daemon.engine.events import (
    ArenaFailed,
    ArenaReady,
    Event,
    FrameArrived,
    GroupBroken,
    GroupStarted,
    ReceiveCancelled,
    RoomMade,
    Submitted,
)
from allreduced.daemon.engine.limits import Limits
from allreduced.daemon.engine.region import Region
from allreduced.protocol.peer import (
    Confirm,
    Forget,
    Forgettable,
    Grant,
    OperationFrame,
    Queued,
    Ready,
    Withdraw,
    Withdrawn,
)

ONE_AT_A_TIME = Limits(inline_bytes=0, arena_bytes=24 << 10, scratch_bytes=8192, arena_chunk=4096)
KIB4 = 4 << 10
BIG = fingerprint(count=KIB4)
"""16 KiB: the only one that fits."""


def _call(cluster: Cluster, name: str, priority: int = 0) -> Call:
    return Call(name, BIG, random_data(cluster.rng, DType.FLOAT32, KIB4), priority, deadline=1.0)


def _good(requests: list[Request]) -> bool:
    return all(request.error is None for request in requests)


def _frames(cluster: Cluster, kind: type[OperationFrame]) -> list[OperationFrame]:
    return [frame for _, _, frame in cluster.network.frames if isinstance(frame, kind)]


def test_two_nodes_at_their_limit_in_opposite_order_do_not_deadlock() -> None:
    for seed in range(20):
        cluster = Cluster(seed, [{"a": [0], "b": [1]}], ONE_AT_A_TIME, tile_bytes=1024)
        requests = [
            cluster.submit(at, 1, rank, _call(cluster, name))
            for rank, names in ((0, "xy"), (1, "yx"))
            for at, name in zip((5e-3, 9e-3), names, strict=True)
        ]
        cluster.run()
        assert _good(requests)
        assert _frames(cluster, Withdraw)
        cluster.close()


def test_two_groups_with_their_lowest_ranks_on_different_nodes_do_not_deadlock() -> None:
    for seed in range(20):
        layouts = [{"a": [0], "b": [1]}, {"b": [0], "a": [1]}]
        cluster = Cluster(seed, layouts, ONE_AT_A_TIME, tile_bytes=1024)
        requests = [
            cluster.submit(5e-3 + cluster.rng.random() * 1e-3, group, rank, _call(cluster, "x"))
            for group in (1, 2)
            for rank in (0, 1)
            for _ in range(3)
        ]
        cluster.run()
        assert _good(requests)
        cluster.close()


def test_what_everybody_called_is_not_held_up_by_what_somebody_has_not() -> None:
    cluster = Cluster(3, [{"a": [0], "b": [1]}], ONE_AT_A_TIME, tile_bytes=1024)
    first = [cluster.submit(5e-3, 1, 0, _call(cluster, "early")), cluster.submit(6e-3, 1, 0, _call(cluster, "x"))]
    second = cluster.submit(7e-3, 1, 1, _call(cluster, "x"))
    done: list[bool] = []
    cluster.agenda.at(0.4, lambda: done.append(bool(second.answers) and bool(first[1].answers)))
    last = cluster.submit(0.5, 1, 1, _call(cluster, "early"))
    cluster.run()
    assert done == [True]
    assert _good([*first, second, last])


def test_higher_priority_is_served_first_under_pressure() -> None:
    cluster = Cluster(4, [{"a": [0], "b": [1]}], ONE_AT_A_TIME, tile_bytes=1024)
    cluster.lease_time = 0.0
    calls = [(5e-3, "first", 0), (50e-3, "running", 0), (53e-3, "low", 0), (53.1e-3, "high", 9)]
    for at, name, priority in calls:
        for rank in (0, 1):
            cluster.submit(at, 1, rank, _call(cluster, name, priority))
    cluster.run()
    assert [name for name, _ in dict.fromkeys(cluster.finished)] == ["first", "running", "high", "low"]


class Node:
    """Node ``b`` with rank 1 of a group of three nodes; memory for one operation; arenas are ready at once.

    ``makes`` false: result arenas cannot be made.
    """

    def __init__(self, limits: Limits = ONE_AT_A_TIME) -> None:
        self.engine = Engine("b", limits)
        self.makes = True
        members = tuple(Member(node, 1, (rank,)) for rank, node in enumerate("abc"))
        self.do(GroupStarted(1, GroupKey(1, "job", "world"), 1, 1024, members, 1, {1: 1}))
        self.request = 0

    def do(self, event: Event) -> list[Action]:
        """Return the actions, those that follow from ready arenas included."""
        actions = self.engine.handle(event, 1.0)
        for action in list(actions):
            if isinstance(action, CreateArena):
                failed = ArenaFailed(action.buffer, LimitExceeded("none left"))
                actions += self.do(ArenaReady(action.buffer) if self.makes or not action.group else failed)
        return [action for action in actions if not isinstance(action, CreateArena | DestroyArena)]

    def states(self) -> dict[str, str]:
        """Return the state of each operation, by name."""
        return {one["name"]: one["state"] for one in self.engine.snapshot()["groups"][1]["operations"]}

    def submit(self, name: str) -> list[Action]:
        """Let rank 1 call an operation that fills the memory."""
        self.request += 1
        return self.do(Submitted(1, self.request, 1, 1, name, BIG, Region(1, 0, 4 * KIB4), 1e3, 0))

    def peer(self, node: str, frame: OperationFrame) -> list[Action]:
        """Let a peer send a frame."""
        return self.do(FrameArrived(node, frame))

    def withdraw_x_for_y(self) -> list[Action]:
        """Hold ``x``, then let ``y`` come first in the agreed order."""
        self.submit("x")
        assert [type(action.frame) for action in self.submit("y") if isinstance(action, SendFrame)] == [Queued] * 2
        self.peer("a", Queued(1, 1, "y", 0, (0, 1, 0)))
        return self.peer("c", Queued(1, 1, "y", 0, ()))


def _sent(actions: list[Action]) -> list[tuple[str, OperationFrame]]:
    return [
        (action.node, action.frame)
        for action in actions
        if isinstance(action, SendFrame) and not isinstance(action.frame, Forget | Forgettable | Confirm)
    ]


def test_ready_is_withdrawn_and_memory_reused_only_after_all_receives_are_closed() -> None:
    node = Node()
    withdraw = Withdraw(1, 1, "x", 0, 1)
    assert _sent(node.withdraw_x_for_y()) == [("a", withdraw), ("c", withdraw)]
    assert node.peer("a", Withdrawn(1, 1, "x", 0, 1, True)) == []
    cancelled = node.peer("c", Withdrawn(1, 1, "x", 0, 1, True))
    receives = [action.receive for action in cancelled if isinstance(action, CancelReceive)]
    assert len(receives) == len(cancelled) == 4
    for receive in receives[:-1]:
        assert node.do(ReceiveCancelled(receive)) == []
    actions = node.do(ReceiveCancelled(receives[-1]))
    frames = [frame for _, frame in _sent(actions)]
    assert [(type(frame), frame.name) for frame in frames] == [(Ready, "y")] * 2
    assert len([action for action in actions if isinstance(action, PostReceive)]) == 4


def test_a_refused_withdrawal_makes_ready_again_for_those_that_dropped_it() -> None:
    node = Node()
    node.withdraw_x_for_y()
    node.peer("a", Withdrawn(1, 1, "x", 0, 1, False))
    ((target, frame),) = _sent(node.peer("c", Withdrawn(1, 1, "x", 0, 1, True)))
    assert target == "c"
    assert isinstance(frame, Ready)
    assert (frame.name, frame.attempt, len(frame.grants)) == ("x", 2, 2)
    assert node.peer("c", Queued(1, 1, "y", 0, ())) == []


def test_a_withdraw_is_refused_once_data_flows() -> None:
    node = Node()
    node.submit("x")
    grants = (Grant(5, 0, 0, 0, 1, b"t"), Grant(6, 1, 1, 0, 1, b"t"))
    assert _sent(node.peer("a", Ready(1, 1, "x", 0, 1, BIG, (0, 1, 0), grants))) == []
    accepted = node.peer("a", Withdraw(1, 1, "x", 0, 1))
    assert _sent(accepted) == [("a", Withdrawn(1, 1, "x", 0, 1, True))]
    node.peer("a", Ready(1, 1, "x", 0, 2, BIG, (0, 1, 0), grants))
    grants = (Grant(5, 0, 2, 0, 1, b"t"), Grant(6, 1, 1, 0, 1, b"t"))
    node.peer("c", Ready(1, 1, "x", 0, 1, BIG, (), grants))
    assert node.engine.snapshot()["groups"][1]["operations"][0]["state"] == "running"
    assert _sent(node.peer("c", Withdraw(1, 1, "x", 0, 1))) == [("c", Withdrawn(1, 1, "x", 0, 1, False))]


def test_an_operation_that_can_never_fit_fails_on_all_ranks() -> None:
    cluster = Cluster(1, [{"a": [0], "b": [1]}], ONE_AT_A_TIME)
    large = fingerprint(count=2 * KIB4)
    data = random_data(cluster.rng, DType.FLOAT32, 2 * KIB4)
    requests = [cluster.submit(5e-3 * (rank + 1), 1, rank, Call("x", large, data)) for rank in (1, 0)]
    cluster.run()
    for request in requests:
        assert isinstance(request.error, LimitExceeded)
        assert request.error.limit == "limits.arena_bytes"


def test_a_group_that_breaks_during_a_withdrawal_frees_everything() -> None:
    node = Node()
    node.withdraw_x_for_y()
    actions = node.do(GroupBroken(1, PeerLost("gone", nodes=["c"])))
    assert [action.request for action in actions if isinstance(action, Fail)] == [1, 2]
    for action in actions:
        if isinstance(action, CancelReceive):
            node.do(ReceiveCancelled(action.receive))
    assert node.engine.snapshot()["memory"]["reserved_bytes"] == 0


@pytest.mark.parametrize("small_ones_too", [True, False])
@pytest.mark.parametrize("calls", ["x", "xyz"])
def test_buffers_that_cannot_be_made_are_not_tried_for_ever(calls: str, *, small_ones_too: bool) -> None:
    engine = Engine("a", Limits(inline_bytes=0))
    members = (Member("a", 1, (0,)), Member("b", 1, (1,)))
    todo = engine.handle(GroupStarted(1, GroupKey(1, "j", "w"), 1, 4096, members, 0, {0: 10}), 0.0)
    for request, name in enumerate(calls):
        submitted = Submitted(10, request, 1, 0, name, fingerprint(count=64), Region(1, 0, 256), 60.0, 0)
        todo += engine.handle(submitted, 0.0)
    made, ends = 0, {}
    while todo:
        action = todo.pop(0)
        if isinstance(action, CreateArena):
            made += 1
            fails = action.group or small_ones_too
            none = ArenaFailed(action.buffer, LimitExceeded("none left", limit="descriptors"))
            todo += engine.handle(none if fails else ArenaReady(action.buffer), 0.0)
        elif isinstance(action, Fail):
            assert isinstance(action.error, LimitExceeded)
            assert action.error.limit == "descriptors"
            ends[action.request] = action.error.message
    assert ends == {
        request: f"group 'w' of job 'j': {name!r} (use 0) failed on node 'a': none left"
        for request, name in enumerate(calls)
    }
    assert made < 60
    assert engine.snapshot()["memory"]["reserved_bytes"] == 0


def test_who_lacks_a_buffer_waits_as_long_as_another_operation_has_memory() -> None:
    node = Node(Limits(inline_bytes=0, arena_chunk=4096))
    node.submit("x")
    node.makes = False
    for number in range(20):
        assert not [action for action in node.submit(f"y{number}") if isinstance(action, Fail)]
        node.do(RoomMade())
    assert node.states() == {"x": "ready", **{f"y{number}": "queued" for number in range(20)}}
    node.makes = True
    node.do(RoomMade())
    assert set(node.states().values()) == {"ready"}
