"""Tile by tile: what is reduced, sent and granted when, and how results and leases end."""

from __future__ import annotations

from tests.simulation.cluster import fingerprint

from allreduced.core.dtypes import DType
from allreduced.core.errors import LimitExceeded, ProtocolError
from allreduced.core.identity import GroupKey, Member
from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.actions import (
    Action,
    CancelReceive,
    CancelSend,
    CreateArena,
    Deliver,
    DestroyArena,
    Fail,
    PostReceive,
    Reduce,
    Send,
    SendFrame,
)
from allreduced.daemon.engine.engine import Engine
from allreduced.daemon.engine.events import (
    ArenaReady,
    ClientGone,
    Event,
    FrameArrived,
    GroupForgotten,
    GroupStarted,
    LeasesReturned,
    RanksLeft,
    ReceiveCancelled,
    Received,
    Reduced,
    Sent,
    Submitted,
    TimePassed,
)
from allreduced.daemon.engine.limits import Limits
from allreduced.daemon.engine.program import compile_program
from allreduced.daemon.engine.region import Region
from allreduced.protocol.peer import Abort, Fingerprint, Grant, MoreGrants, Ready
from allreduced.schedules.direct import canonical

TILE = 64
COUNT = 256
"""Two blocks of 128 elements: 512 bytes, 8 tiles each."""
CALL = fingerprint(count=COUNT)
TAG = 1 << 32 | 1


class Half:
    """Node ``a``, which owns block 0, of a group of two nodes; windows of two tiles."""

    def __init__(self, ranks: tuple[int, ...] = (0,), limits: Limits | None = None) -> None:
        self.engine = Engine("a", limits or Limits(inline_bytes=0, window_tiles=2))
        self.ranks = ranks
        other = Member("b", 1, (max(ranks) + 1,))
        local = {rank: 10 + rank for rank in ranks}
        self.do(GroupStarted(1, GroupKey(1, "j", "w"), 1, TILE, (Member("a", 1, ranks), other), 0, local))

    def do(self, event: Event) -> list[Action]:
        """Return the actions, those that follow from ready arenas included."""
        actions = self.engine.handle(event, 1.0)
        for action in list(actions):
            if isinstance(action, CreateArena):
                actions += self.do(ArenaReady(action.buffer))
        return [action for action in actions if not isinstance(action, CreateArena)]

    def submit(self, described: Fingerprint = CALL) -> list[Action]:
        """Let all local ranks submit; returns the actions of the last one."""
        actions: list[Action] = []
        for rank in self.ranks:
            source = Region(rank, 0, DType(described.dtype).itemsize * described.count)
            actions = self.do(Submitted(10 + rank, 1, 1, rank, "x", described, source, 1e3, 0))
        return actions

    def begin(self, described: Fingerprint = CALL) -> tuple[list[PostReceive], list[Action]]:
        """Submit and let the peer be ready; returns the posted receives and what is done first."""
        posted = [action for action in self.submit(described) if isinstance(action, PostReceive)]
        grants = (Grant(7, 0, 1, 0, 2, b"seven"), Grant(8, 1, 0, 0, 8, b"eight"))
        return posted, self.do(FrameArrived("b", Ready(1, 1, "x", 0, 1, described, (), grants)))


def _of(actions: list[Action], kind: type) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def test_one_input_is_sent_from_where_it_lies_and_reduced_once() -> None:
    half = Half()
    posted, first = half.begin()
    assert [action.region.nbytes for action in posted] == [2 * TILE, 512]
    (send,) = first
    assert isinstance(send, Send)
    assert (send.node, send.token, send.offset, send.tag) == ("b", b"seven", 0, TAG)
    assert send.region == Region(0, 512, 2 * TILE)
    window, final = posted
    (reduce,) = half.do(Received(window.receive, 0, 2 * TILE, TAG))
    assert isinstance(reduce, Reduce)
    assert reduce.sources == (Region(0, 0, 2 * TILE), window.region)
    assert reduce.target == Region(final.region.buffer, final.region.offset - 512, 2 * TILE)
    actions = half.do(Reduced(reduce.job))
    assert [type(action) for action in actions] == [PostReceive, SendFrame, Send]
    frame = actions[1].frame if isinstance(actions[1], SendFrame) else None
    assert isinstance(frame, MoreGrants)
    assert [(grant.block, grant.first, grant.tiles) for grant in frame.grants] == [(0, 2, 2)]
    assert isinstance(actions[2], Send)
    assert (actions[2].token, actions[2].offset, actions[2].region) == (b"eight", 0, reduce.target)


def test_several_inputs_are_reduced_on_demand_before_they_are_sent() -> None:
    half = Half(ranks=(0, 1))
    posted, first = half.begin()
    (partial,) = first
    assert isinstance(partial, Reduce)
    assert partial.sources == (Region(0, 512, 2 * TILE), Region(1, 512, 2 * TILE))
    assert partial.target == posted[1].region._replace(nbytes=2 * TILE)
    (send,) = half.do(Reduced(partial.job))
    assert isinstance(send, Send)
    assert send.region == partial.target
    (final,) = half.do(Received(posted[0].receive, 0, 2 * TILE, TAG))
    assert isinstance(final, Reduce)
    assert [region.buffer for region in final.sources] == [0, 1, posted[0].region.buffer]


def test_in_the_canonical_order_the_local_sum_takes_its_place_among_the_received() -> None:
    half = Half(ranks=(0, 1))
    (window, final), (own, other) = half.begin(fingerprint(count=COUNT, algorithm="canonical"))
    assert isinstance(own, Reduce)
    assert isinstance(other, Reduce)
    assert own.sources == (Region(0, 0, 2 * TILE), Region(1, 0, 2 * TILE))  # no further than tiles can arrive
    assert own.target == Region(final.region.buffer, final.region.offset - 512, 2 * TILE)
    assert other.target == final.region._replace(nbytes=2 * TILE)
    assert half.do(Received(window.receive, 0, TILE, TAG)) == []
    (reduce,) = half.do(Reduced(own.job))
    assert isinstance(reduce, Reduce)
    place = own.target._replace(nbytes=TILE)
    assert (reduce.sources, reduce.target) == ((place, window.region._replace(nbytes=TILE)), place)
    program = compile_program(canonical(3), 1)
    assert [level.own for level in program.blocks[1].levels] == [1]


def test_partial_values_of_16_bit_floats_go_around_a_ring_in_float32() -> None:
    half = Half()
    described = fingerprint(dtype=DType.BFLOAT16, op=Reduction.MEAN, count=COUNT, algorithm="ring")
    (window, final), (partial,) = half.begin(described)
    # 128 elements a block; a tile is 16 elements: 64 bytes of float32, 32 bytes where values are final.
    assert (window.region.nbytes, final.region.nbytes) == (2 * TILE, 256)
    assert isinstance(partial, Reduce)
    assert (partial.reduction, partial.count, partial.partials, partial.partial_target) == (Reduction.SUM, 32, 0, True)
    assert partial.sources == (Region(0, 256, 64),)
    assert partial.target.nbytes == 2 * TILE
    assert partial.target.buffer == window.region.buffer
    (send,) = half.do(Reduced(partial.job))
    assert isinstance(send, Send)
    assert (send.region, send.offset) == (partial.target, 0)
    assert partial.share == send.share > 0  # the uid of the group
    (reduce,) = half.do(Received(window.receive, 0, 2 * TILE, TAG))
    assert isinstance(reduce, Reduce)
    assert (reduce.reduction, reduce.divisor, reduce.partials, reduce.partial_target) == (Reduction.MEAN, 2, 1, False)
    assert reduce.sources == (Region(0, 0, 64), window.region)
    assert reduce.target == Region(final.region.buffer, final.region.offset - 256, 64)
    # A slot of the window is used again only when its tile was sent.
    more = MoreGrants(1, 1, "x", 0, 1, (Grant(9, 0, 1, 2, 2, b"nine"),))
    assert half.do(FrameArrived("b", more)) == []
    (again,) = half.do(Sent(send.send))
    assert isinstance(again, Reduce)
    assert (again.target, again.sources) == (partial.target, (Region(0, 320, 64),))


def test_pieces_in_any_order_and_size_make_tiles() -> None:
    half = Half()
    (window, _), _ = half.begin()
    assert half.do(Received(window.receive, TILE, TILE, TAG)) == []
    assert half.do(Received(window.receive, 3, TILE - 3, TAG)) == []
    (reduce,) = half.do(Received(window.receive, 0, 3, TAG))
    assert isinstance(reduce, Reduce)
    assert reduce.target.nbytes == 2 * TILE


def test_a_mean_is_divided_once_where_it_is_final() -> None:
    half = Half(ranks=(0, 1))
    mean = fingerprint(count=COUNT, op=Reduction.MEAN)
    posted = [action for action in half.submit(mean) if isinstance(action, PostReceive)]
    grants = (Grant(7, 0, 1, 0, 2, b"seven"), Grant(8, 1, 0, 0, 8, b"eight"))
    (partial,) = half.do(FrameArrived("b", Ready(1, 1, "x", 0, 1, mean, (), grants)))
    (final,) = half.do(Received(posted[0].receive, 0, TILE, TAG))
    assert isinstance(partial, Reduce)
    assert isinstance(final, Reduce)
    assert (partial.reduction, partial.divisor) == (Reduction.SUM, 1)
    assert (final.reduction, final.divisor) == (Reduction.MEAN, 3)


def test_data_that_does_not_fit_ends_the_operation_everywhere() -> None:
    half = Half()
    (window, final), (send,) = half.begin()
    actions = half.do(Received(window.receive, TILE, 2 * TILE, TAG))
    assert [type(action) for action in actions] == [CancelReceive, CancelReceive]
    # The end of the generation may be near, if a link was reset: so the others are told in a while.
    abort, *_ = half.engine.handle(TimePassed(), 2.25)
    assert isinstance(abort, SendFrame)
    assert isinstance(abort.frame, Abort)
    assert not abort.frame.final
    assert isinstance(send, Send)
    assert half.do(FrameArrived("b", abort.frame)) == [CancelSend(send.send, "b")]
    (fail,) = half.do(Sent(send.send))
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, ProtocolError)
    assert half.engine.snapshot()["memory"]["reserved_bytes"] > 0
    for posting in (window, final):
        half.do(ReceiveCancelled(posting.receive))
    assert half.engine.snapshot()["memory"]["reserved_bytes"] == 0


def test_grants_for_what_nobody_sends_end_the_operation() -> None:
    half = Half()
    half.submit()
    bad = Ready(1, 1, "x", 0, 1, CALL, (), (Grant(7, 0, 0, 0, 2, b"t"),))
    half.do(FrameArrived("b", bad))
    abort, *_ = half.engine.handle(TimePassed(), 2.25)
    assert isinstance(abort, SendFrame)
    assert isinstance(abort.frame, Abort)
    assert [type(action.error) for action in half.do(FrameArrived("b", abort.frame)) if isinstance(action, Fail)] == [
        ProtocolError
    ]


class Alone:
    """One node with two ranks and results under leases."""

    def __init__(self, limits: Limits) -> None:
        self.engine = Engine("a", limits)
        started = GroupStarted(1, GroupKey(1, "j", "w"), 1, TILE, (Member("a", 1, (0, 1)),), 0, {0: 10, 1: 11})
        self.engine.handle(started, 0.0)
        self.request = 0

    def run(self) -> list[Action]:
        """Let both ranks reduce 400 bytes; returns the answers."""
        self.request += 1
        actions: list[Action] = []
        for rank in (0, 1):
            event = Submitted(10 + rank, self.request, 1, rank, "", fingerprint(), Region(rank, 0, 400), 1e3, 0)
            actions = self.engine.handle(event, 1.0)
        for action in actions:
            if isinstance(action, CreateArena):
                actions = self.engine.handle(ArenaReady(action.buffer), 1.0)
        (job,) = [action.job for action in actions if isinstance(action, Reduce)]
        return self.engine.handle(Reduced(job), 2.0)

    @property
    def reserved(self) -> int:
        """Bytes reserved."""
        return self.engine.snapshot()["memory"]["reserved_bytes"]


def test_a_result_lives_until_its_last_lease_is_back() -> None:
    alone = Alone(Limits(inline_bytes=0))
    one, two = alone.run()
    assert isinstance(one, Deliver)
    assert isinstance(two, Deliver)
    assert one.region == two.region
    assert one.elapsed == 1.0
    alone.engine.handle(LeasesReturned(10, (one.lease, 999, two.lease)), 3.0)
    assert alone.reserved == 448
    alone.engine.handle(ClientGone(11), 3.0)
    assert alone.reserved == 0


def test_a_client_over_its_quota_fails_alone() -> None:
    alone = Alone(Limits(inline_bytes=0, lease_bytes=1000))
    answers = [alone.run() for _ in range(2)]
    alone.engine.handle(
        LeasesReturned(10, tuple(pair[0].lease for pair in answers if isinstance(pair[0], Deliver))), 3.0
    )
    mine, other = alone.run()
    assert isinstance(mine, Deliver)
    assert isinstance(other, Fail)
    assert isinstance(other.error, LimitExceeded)
    assert (other.client, other.error.limit) == (11, "limits.lease_bytes")


def test_a_client_that_is_gone_gets_no_lease() -> None:
    alone = Alone(Limits(inline_bytes=0))
    actions: list[Action] = []
    for rank in (0, 1):
        event = Submitted(10 + rank, 1, 1, rank, "", fingerprint(), Region(rank, 0, 400), 1e3, 0)
        actions = alone.engine.handle(event, 1.0)
    alone.engine.handle(RanksLeft(1, (0, 1)), 1.0)
    alone.engine.handle(ClientGone(10), 1.0)
    alone.engine.handle(ClientGone(11), 1.0)
    alone.engine.handle(GroupForgotten(1), 1.0)
    (create,) = _of(actions, CreateArena)
    assert isinstance(create, CreateArena)
    (reduce,) = alone.engine.handle(ArenaReady(create.buffer), 1.0)
    assert isinstance(reduce, Reduce)
    last = alone.engine.handle(Reduced(reduce.job), 1.0)
    assert [type(action) for action in last] == [Fail, Fail, DestroyArena]
    assert alone.engine.snapshot()["groups"] == {}
