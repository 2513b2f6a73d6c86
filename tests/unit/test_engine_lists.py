"""Lists of several dtypes that differ between ranks leave nothing behind: all their operations fail with the first."""

from __future__ import annotations

import hashlib
from collections import deque

import pytest
from tests.simulation.cluster import fingerprint

from allreduced.core.dtypes import DType
from allreduced.core.errors import MismatchError, RankLost
from allreduced.core.identity import GroupKey, Member
from allreduced.daemon.engine.actions import Action, CancelReceive, CreateArena, Deliver, Fail, Reduce, SendFrame
from allreduced.daemon.engine.engine import Engine
from allreduced.daemon.engine.events import (
    ArenaReady,
    Event,
    FrameArrived,
    GroupBroken,
    GroupStarted,
    ReceiveCancelled,
    Reduced,
    Submitted,
    TimePassed,
)
from allreduced.daemon.engine.limits import Limits
from allreduced.daemon.engine.region import Region
from allreduced.protocol.peer import Fingerprint

GROUP = 5
KEY = GroupKey(1, "job", "world")
NOW = 100.0
MIXED = "float32(8,);float64(8,)"
PLAIN = "(8,);(8,)"


class Nodes:
    """Engines whose frames reach each other at once, in order; reductions are over at once."""

    def __init__(self, *ranks: tuple[int, ...], limits: Limits | None = None) -> None:
        self.members = tuple(Member(f"n{index}", 1, held) for index, held in enumerate(ranks))
        self.engines = {member.node: Engine(member.node, limits or Limits()) for member in self.members}
        self.node_of = {rank: member.node for member in self.members for rank in member.ranks}
        self.ended: list[tuple[int, Deliver | Fail]] = []
        self.requests: dict[int, tuple[int, str]] = {}
        self.now = NOW
        for index, member in enumerate(self.members):
            local = {rank: rank for rank in member.ranks}
            self.do(member.node, GroupStarted(GROUP, KEY, 1, 1 << 20, self.members, index, local))

    def do(self, node: str, event: Event) -> None:
        events = deque([(node, event)])
        while events:
            node, event = events.popleft()
            for action in self.engines[node].handle(event, self.now):
                events.extend(self._follows(node, action))

    def _follows(self, node: str, action: Action) -> list[tuple[str, Event]]:
        match action:
            case SendFrame(to, frame):
                return [(to, FrameArrived(node, frame))]
            case CreateArena(buffer=buffer):
                return [(node, ArenaReady(buffer))]
            case CancelReceive(receive=receive):
                return [(node, ReceiveCancelled(receive))]
            case Reduce(job=job):
                return [(node, Reduced(job))]
            case Deliver() | Fail():
                self.ended.append((action.request, action))
                return []
            case _:
                return []

    def submit(self, rank: int, name: str, described: Fingerprint, deadline: float = 30.0) -> int:
        """Return the number of the request."""
        request = len(self.requests) + 1
        self.requests[request] = rank, name
        nbytes = described.count * DType(described.dtype).itemsize
        source = Region(1000 + request, 0, nbytes) if nbytes else None
        event = Submitted(rank, request, GROUP, rank, name, described, source, self.now + deadline, 0)
        self.do(self.node_of[rank], event)
        return request

    def mixed(self, rank: int, name: str = "x", use: int = 0) -> None:
        self.submit(rank, name, part(DType.FLOAT32, MIXED))
        self.submit(rank, further(name, use), part(DType.FLOAT64, MIXED))

    def plain(self, rank: int, name: str = "x") -> None:
        self.submit(rank, name, part(DType.FLOAT32, PLAIN, 16))

    def failed(self) -> dict[tuple[int, str], str]:
        """Return how calls ended, by rank and name."""
        found = {}
        for request, action in self.ended:
            assert self.requests[request] not in found, "it ended twice"
            found[self.requests[request]] = type(action.error).__name__ if isinstance(action, Fail) else "delivered"
        return found

    def left(self, node: str) -> tuple[int, int, int, int]:
        """Return counts: operations in flight, those whose memory is in use, outcomes kept, bytes reserved."""
        engine = self.engines[node]
        group = engine._groups[GROUP]
        reserved = engine.snapshot()["memory"]["reserved_bytes"]
        assert isinstance(reserved, int)
        return len(group.operations), len(group.ending), len(group.outcomes), reserved


def part(dtype: DType, shape: str, count: int = 8) -> Fingerprint:
    return Fingerprint("all_reduce_many", int(dtype), 1, shape, count, -1, "")


def further(name: str, use: int = 0, label: str = "float64") -> str:
    return f"{name}/{label}#{use}"


NOTHING = (0, 0, 0, 0)


def test_on_one_node_all_operations_of_a_list_fail_with_the_first() -> None:
    nodes = Nodes((0, 1))
    nodes.mixed(0)
    assert nodes.left("n0")[:3] == (2, 0, 0)
    nodes.plain(1)
    assert nodes.failed() == dict.fromkeys([(0, "x"), (0, further("x")), (1, "x")], "MismatchError")
    assert nodes.left("n0") == NOTHING


def test_on_one_node_what_comes_after_the_first_has_failed_is_refused() -> None:
    nodes = Nodes((0, 1))
    nodes.plain(1)
    nodes.mixed(0)
    assert nodes.failed() == dict.fromkeys([(0, "x"), (0, further("x")), (1, "x")], "MismatchError")
    assert nodes.left("n0") == NOTHING


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_between_nodes_nothing_is_left_on_any(order: tuple[int, ...]) -> None:
    """Ranks 0 and 1 on one node call two dtypes, 2 and 3 on the other call one."""
    nodes = Nodes((0, 1), (2, 3))
    for rank in order:
        (nodes.mixed if rank < 2 else nodes.plain)(rank)
    wanted = [(rank, "x") for rank in range(4)] + [(rank, further("x")) for rank in range(2)]
    assert nodes.failed() == dict.fromkeys(wanted, "MismatchError")
    assert [nodes.left(member.node) for member in nodes.members] == [NOTHING, NOTHING]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_three_nodes_of_which_one_differs(order: tuple[int, ...]) -> None:
    nodes = Nodes((0,), (1,), (2,))
    for rank in order:
        (nodes.plain if rank == 1 else nodes.mixed)(rank)
    wanted = [(rank, "x") for rank in range(3)] + [(rank, further("x")) for rank in (0, 2)]
    assert nodes.failed() == dict.fromkeys(wanted, "MismatchError")
    assert [nodes.left(member.node) for member in nodes.members] == [NOTHING] * 3


def test_a_rank_that_calls_only_after_the_mismatch_was_settled_is_told_at_once() -> None:
    nodes = Nodes((0,), (1,), (2,))
    nodes.mixed(0)
    nodes.plain(1)
    nodes.now += 1.0  # for so long the others are waited for, so that the error names all
    for node in nodes.engines:
        nodes.do(node, TimePassed())
    assert nodes.failed() == dict.fromkeys([(0, "x"), (0, further("x")), (1, "x")], "MismatchError")
    nodes.mixed(2)
    assert nodes.failed()[2, "x"] == nodes.failed()[2, further("x")] == "MismatchError"
    assert [nodes.left(member.node) for member in nodes.members] == [NOTHING] * 3


def test_unnamed_and_long_names() -> None:
    long = "é" * 125
    nodes = Nodes((0, 1))
    for name, base in (("", ""), (long, hashlib.sha256(long.encode()).hexdigest())):
        nodes.submit(0, name, part(DType.FLOAT32, MIXED))
        nodes.submit(0, further(base, 7), part(DType.FLOAT64, MIXED))
        nodes.plain(1, name)
        assert nodes.failed()[0, further(base, 7)] == "MismatchError"
    assert nodes.left("n0") == NOTHING


def test_lists_that_agree_end_well_and_a_later_list_of_the_name_is_not_touched() -> None:
    nodes = Nodes((0, 1))
    nodes.mixed(0)
    nodes.plain(1)
    nodes.ended.clear()
    for rank in (0, 1):
        nodes.mixed(rank, use=1)
    assert nodes.failed() == {(rank, name): "delivered" for rank in (0, 1) for name in ("x", further("x", 1))}
    assert nodes.left("n0") == NOTHING


def test_several_lists_at_once_fail_each_with_its_own() -> None:
    nodes = Nodes((0, 1))
    for use in range(3):
        nodes.mixed(0, "", use)
    nodes.mixed(1, "", 0)
    nodes.plain(1, "")
    nodes.mixed(1, "", 2)
    ended = [(nodes.requests[request], type(action).__name__) for request, action in nodes.ended]
    assert sorted(ended) == sorted(
        [((rank, name), "Deliver") for rank in (0, 1) for name in ("", further("", 0), "", further("", 2))]
        + [((0, ""), "Fail"), ((1, ""), "Fail"), ((0, further("", 1)), "Fail")]
    )
    assert nodes.left("n0") == NOTHING


def test_what_only_looks_like_a_part_of_a_list_is_left_alone() -> None:
    nodes = Nodes((0, 1))
    nodes.submit(0, "x", part(DType.FLOAT32, MIXED))
    other = [
        (further("x"), fingerprint(count=8, dtype=DType.FLOAT64)),  # no list
        (further("x", 1), part(DType.FLOAT64, "float32(9,);float64(8,)")),  # another list
        (further("y"), part(DType.FLOAT64, MIXED)),  # of another call
        ("x/float64", part(DType.FLOAT64, MIXED)),
    ]
    for name, described in other:
        nodes.submit(0, name, described)
    nodes.plain(1)
    assert nodes.failed() == dict.fromkeys([(0, "x"), (1, "x")], "MismatchError")
    for name, described in other:
        nodes.submit(1, name, described)
    assert nodes.failed() == {
        **dict.fromkeys([(0, "x"), (1, "x")], "MismatchError"),
        **{(rank, name): "delivered" for rank in (0, 1) for name, _ in other},
    }


def test_another_failure_of_the_first_does_not_touch_the_others() -> None:
    nodes = Nodes((0, 1))
    nodes.mixed(0)
    nodes.do("n0", GroupBroken(GROUP, RankLost("gone", ranks=[1])))
    assert nodes.failed() == dict.fromkeys([(0, "x"), (0, further("x"))], "RankLost")


def test_the_error_is_that_of_the_first() -> None:
    nodes = Nodes((0,), (1,))
    nodes.mixed(0)
    nodes.plain(1)
    errors = [action.error for _, action in nodes.ended if isinstance(action, Fail)]
    assert len(errors) == 3
    assert {str(error) for error in errors} == {str(errors[0])}
    assert all(isinstance(error, MismatchError) and error.field == "shape" for error in errors)


def test_a_name_that_is_forgotten_begins_anew_without_the_failure_of_before() -> None:
    nodes = Nodes((0, 1), limits=Limits(names_kept=1))
    name = further("x")  # a user may call a single tensor so
    nodes.plain(0, name)
    nodes.submit(1, name, part(DType.FLOAT64, PLAIN, 16))
    assert nodes.failed() == {(0, name): "MismatchError", (1, name): "MismatchError"}
    for other in "yz":  # more than are kept
        for rank in (0, 1):
            nodes.plain(rank, other)
    nodes.ended.clear()
    for rank in (0, 1):
        nodes.plain(rank, name)
    assert nodes.failed() == {(0, name): "delivered", (1, name): "delivered"}
