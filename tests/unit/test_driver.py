"""The driver turns actions into calls of links, kernels, arenas and clients, and their answers into events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from tests.support.driver_rig import (
    FINGERPRINT,
    GROUP,
    PRIVATE,
    FakeClients,
    FakeKernels,
    FakeLink,
    FakePeers,
    Rig,
    Script,
    reduce,
    rigged,
    submitted,
)

from allreduced.core.dtypes import DType
from allreduced.core.errors import InvalidArgument
from allreduced.core.reductions import Reduction
from allreduced.daemon.arena_table import ArenaLimits, ArenaTable
from allreduced.daemon.driver import AT_ONCE, Driver
from allreduced.daemon.engine import actions, events
from allreduced.daemon.engine.region import FIRST_ENGINE_BUFFER as RESULT
from allreduced.daemon.engine.region import Region
from allreduced.daemon.membership import actions as membership_actions
from allreduced.daemon.membership import events as membership_events
from allreduced.protocol.change import Result as PeerResult
from allreduced.protocol.peer import Announce, Arrived, Grant, Left, MoreGrants, Ready, Withdraw


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with rigged() as rig:
        yield rig


async def test_events_wait_until_the_actions_of_the_one_before_are_done(rig: Rig) -> None:
    await rig.buffers()
    order: list[str] = []

    def answer(event: object) -> Sequence[object]:
        order.append(type(event).__name__)
        if isinstance(event, events.ClientGone):
            return [reduce(1, 8), actions.Fail(100, 1, InvalidArgument("no"))]
        return ()

    rig.driver.engine_event(submitted())
    rig.engine.answer = answer
    rig.driver.engine_event(events.ClientGone(5))
    assert order == ["ClientGone", "Reduced"]
    assert rig.clients.told == [("failed", 100, 1, InvalidArgument)]
    assert rig.engine.events[-2:] == [events.ClientGone(5), events.Reduced(1)]


async def test_small_reductions_run_at_once_and_others_in_the_pool(rig: Rig) -> None:
    await rig.buffers()
    rig.do(reduce(1, AT_ONCE // 2), reduce(2, AT_ONCE // 2 + 4))
    assert rig.kernels.at_once == 1
    assert rig.kernels.queued == [(2, 3, 1001)]
    assert rig.engine.events == [events.Reduced(1)]
    rig.kernels.complete(2)
    await rig.engine.saw(events.Reduced(2))


async def test_native_kernels_reduce_the_memory_of_the_arenas() -> None:
    native = pytest.importorskip("allreduced.daemon.kernels._native")
    del native
    from allreduced.daemon.kernel_port import NativeKernels

    engine, membership, kernels = Script(), Script(), NativeKernels(1)
    arenas = ArenaTable(ArenaLimits.from_total(1 << 24))
    driver = Driver(engine, membership, kernels, arenas)  # type: ignore[arg-type] # the script takes any event
    driver.attach(FakeClients(), FakePeers())
    driver.start()
    rig = Rig(engine, membership, FakeKernels(), arenas, FakePeers(), FakeClients(), driver)
    rig.kernels.close()
    await rig.buffers()
    count = 1 << 15
    first, second = Region(RESULT, 0, 4 * count), Region(RESULT, 4 * count, 4 * count)
    for value, region in ((1.5, first), (2.0, second)):
        with arenas.view(region) as view:
            np.frombuffer(view, np.float32)[:] = value
    rig.do(actions.Reduce(1, DType.FLOAT32, Reduction.MEAN, 2, count, (first, second), first, 0))
    await engine.saw(events.Reduced(1))
    rig.do(actions.Reduce(2, DType.FLOAT32, Reduction.SUM, 1, 4, (first, second), Region(PRIVATE, 0, 16), 0))
    await engine.saw(events.Reduced(2))
    with arenas.view(first) as view, arenas.view(Region(PRIVATE, 0, 16)) as small:
        assert np.all(np.frombuffer(view, np.float32) == 1.75)
        assert np.all(np.frombuffer(small, np.float32) == 3.75)
    driver.close()
    kernels.close()
    await arenas.close()


async def test_grants_carry_the_tokens_of_their_posted_receives(rig: Rig) -> None:
    await rig.buffers()
    link = rig.link("n1")
    grants = (Grant(5, 0, 1, 2, 3, b""), Grant(6, 0, 1, 5, 1, b""))
    ready = Ready(GROUP, 1, "x", 0, 1, FINGERPRINT, (0, 1, 0), grants)
    withdraw = Withdraw(GROUP, 1, "x", 0, 1)
    rig.do(
        actions.PostReceive(5, "n1", Region(RESULT, 0, 64)),
        actions.PostReceive(6, "n1", Region(RESULT, 64, 32)),
        actions.SendFrame("n1", ready),
        actions.SendFrame("n1", MoreGrants(GROUP, 1, "x", 0, 1, grants[1:])),
        actions.SendFrame("n1", withdraw),
    )
    filled = (Grant(5, 0, 1, 2, 3, b"token5"), Grant(6, 0, 1, 5, 1, b"token6"))
    assert rig.peers.frames == [
        ("n1", Ready(GROUP, 1, "x", 0, 1, FINGERPRINT, (0, 1, 0), filled)),
        ("n1", MoreGrants(GROUP, 1, "x", 0, 1, filled[1:])),
        ("n1", withdraw),
    ]
    assert [len(buffer) for buffer in link.posted.values()] == [64, 32]


async def test_grants_of_an_earlier_link_are_not_told_on_the_next(rig: Rig) -> None:
    await rig.buffers()
    old = rig.link("n1")
    rig.do(actions.PostReceive(5, "n1", Region(RESULT, 0, 64)))
    rig.link("n1")
    grants = (Grant(5, 0, 1, 2, 3, b""), Grant(6, 0, 1, 5, 1, b""))
    rig.do(
        actions.PostReceive(6, "n1", Region(RESULT, 64, 32)),
        actions.SendFrame("n1", MoreGrants(GROUP, 1, "x", 0, 1, grants)),
    )
    assert rig.peers.frames == [("n1", MoreGrants(GROUP, 1, "x", 0, 1, (Grant(6, 0, 1, 5, 1, b"token6"),)))]
    rig.driver.closed(old)
    assert rig.engine.events == [events.ReceiveCancelled(5)]
    old.posted.clear()


async def test_a_receive_is_over_with_its_last_byte_and_its_cancel_is_answered(rig: Rig) -> None:
    await rig.buffers()
    link = rig.link("n1")
    rig.do(actions.PostReceive(5, "n1", Region(RESULT, 0, 64)))
    rig.driver.received(link, 5, 32, 32, 9)
    rig.driver.received(link, 5, 0, 32, 9)
    assert rig.engine.events == [events.Received(5, 32, 32, 9), events.Received(5, 0, 32, 9)]
    rig.do(actions.CancelReceive(5, "n1"))
    assert link.calls == []
    assert rig.engine.events[-1] == events.ReceiveCancelled(5)


async def test_a_cancelled_receive_is_reported_when_the_link_says_so(rig: Rig) -> None:
    await rig.buffers()
    link = rig.link("n1")
    rig.do(actions.PostReceive(5, "n1", Region(RESULT, 0, 64)), actions.CancelReceive(5, "n1"))
    assert link.calls == [("cancel_receive", 5)]
    assert rig.engine.events == []
    rig.driver.receive_cancelled(link, 5)
    assert rig.engine.events == [events.ReceiveCancelled(5)]


async def test_a_send_is_over_when_the_link_says_so(rig: Rig) -> None:
    await rig.buffers()
    link = rig.link("n1")
    rig.do(actions.Send(8, "n1", b"t", 128, Region(RESULT, 16, 32), 77, 2, 1000), actions.CancelSend(8, "n1"))
    token, offset, buffer, tag, priority, share = link.sends[8]
    assert (token, offset, len(buffer), tag, priority, share) == (b"t", 128, 32, 77, 2, 1000)
    assert link.calls == [("cancel_send", 8)]
    rig.driver.sent(link, 8)
    assert rig.engine.events == [events.Sent(8)]
    rig.do(actions.CancelSend(8, "n1"))
    assert rig.engine.events == [events.Sent(8)]


async def test_a_closed_link_ends_what_is_outstanding_also_what_is_asked_for_later(rig: Rig) -> None:
    await rig.buffers()
    lost, other = rig.link("n1"), rig.link("n2")
    rig.do(
        actions.PostReceive(5, "n1", Region(RESULT, 0, 64)),
        actions.Send(8, "n1", b"t", 0, Region(RESULT, 0, 32), 0, 0),
        actions.Send(9, "n2", b"t", 0, Region(RESULT, 0, 32), 0, 0),
    )
    del rig.peers.links["n1"]
    rig.driver.closed(lost)
    assert rig.engine.events == [events.ReceiveCancelled(5), events.Sent(8)]
    rig.do(
        actions.CancelReceive(5, "n1"),
        actions.PostReceive(6, "n1", Region(RESULT, 0, 64)),
        actions.CancelReceive(6, "n1"),
        actions.Send(10, "n1", b"t", 0, Region(RESULT, 0, 32), 0, 0),
        actions.CancelSend(10, "n1"),
    )
    assert rig.engine.events[2:] == [events.ReceiveCancelled(5), events.ReceiveCancelled(6), events.Sent(10)]
    rig.driver.sent(other, 9)
    assert rig.engine.events[-1] == events.Sent(9)
    lost.posted.clear()
    lost.sends.clear()


async def test_callbacks_of_another_link_are_not_taken(rig: Rig) -> None:
    await rig.buffers()
    rig.link("n1")
    stranger = FakeLink("n1")
    rig.do(actions.PostReceive(5, "n1", Region(RESULT, 0, 64)))
    rig.driver.received(stranger, 5, 0, 64, 0)
    rig.driver.receive_cancelled(stranger, 5)
    rig.driver.sent(stranger, 8)
    assert rig.engine.events == []


async def test_results_are_delivered_by_copy_or_under_a_lease_once(rig: Rig) -> None:
    await rig.buffers()
    with rig.arenas.view(Region(RESULT, 8, 4)) as view:
        view[:] = b"abcd"
    for request in (1, 2, 3):
        rig.driver.engine_event(submitted(request))
    assert rig.driver.in_flight == 3
    rig.do(
        actions.Deliver(100, 1, Region(RESULT, 8, 4), 0, (), "direct", 0.5),
        actions.Deliver(100, 2, Region(RESULT, 8, 4), 77, (), "direct", 0.5),
        actions.Deliver(100, 3, None, 0, (), "direct", 0.5),
        actions.Deliver(100, 3, None, 0, (), "direct", 0.5),
        actions.Fail(100, 2, InvalidArgument("no")),
    )
    assert rig.clients.told == [
        ("delivered", 100, 1, b"abcd", -1, 0, 4, 0, "direct"),
        ("delivered", 100, 2, None, RESULT, 8, 4, 77, "direct"),
        ("delivered", 100, 3, None, -1, 0, 0, 0, "direct"),
    ]
    assert rig.driver.in_flight == 0


async def test_a_dropped_result_arena_is_told_to_clients_and_a_private_one_is_not(rig: Rig) -> None:
    await rig.buffers()
    rig.do(actions.DestroyArena(RESULT), actions.DestroyArena(PRIVATE))
    assert rig.clients.told == [("arena_gone", RESULT)]
    assert rig.arenas.total_bytes == 0


async def test_an_arena_that_does_not_fit_is_told_to_the_engine(rig: Rig) -> None:
    rig.do(actions.CreateArena(RESULT, GROUP, 1 << 40))
    async with asyncio.timeout(10):
        while not rig.engine.events:
            rig.engine.changed.clear()
            await rig.engine.changed.wait()
    [event] = rig.engine.events
    assert isinstance(event, events.ArenaFailed)
    assert event.buffer == RESULT


async def test_timers_ring_once_at_the_time_set_last(rig: Rig) -> None:
    now = rig.driver.now()
    rig.do(actions.SetTimer(now + 3600), actions.SetTimer(now + 0.01), actions.SetTimer(now + 0.02))
    await rig.engine.saw(events.TimePassed())
    assert rig.engine.times[-1] >= now + 0.02
    rig.engine.events.clear()
    rig.do(actions.SetTimer(now), actions.SetTimer(None))
    rig.membership.answer = lambda event: [membership_actions.SetTimer(now)] if event != tick else ()
    tick = membership_events.TimePassed()
    rig.driver.membership_event(membership_events.ClientGone(1))
    await rig.membership.saw(tick)
    assert rig.engine.events == []


async def test_memberships_reach_peers_engine_and_clients_in_order(rig: Rig) -> None:
    started = rig.form()
    assert rig.engine.events == [started]
    assert rig.clients.told == [("admitted", 100, 1, 0, GROUP)]
    frame = Announce(started.key, 2, 0, 100, 1, 0)
    error = InvalidArgument("no")
    rig.membership.answer = lambda event: [
        membership_actions.SendFrame("n1", frame),
        membership_actions.Reject(101, 4, error),
        membership_actions.TellEngine(events.GroupBroken(GROUP, error)),
        membership_actions.TellClients((100,), GROUP, error),
    ]
    rig.driver.membership_event(membership_events.ClientGone(101))
    assert rig.peers.frames == [("n1", frame)]
    assert rig.clients.told[1:] == [
        ("failed", 101, 4, InvalidArgument),
        ("group_ended", (100,), GROUP, InvalidArgument),
    ]
    assert rig.engine.events[1:] == [events.GroupBroken(GROUP, error)]


async def test_what_the_engine_says_of_it_goes_out_before_what_the_memberships_say_next(rig: Rig) -> None:
    arrived, left = Arrived(GROUP, 1, "x", 0, (1,)), Left(GROUP, 1, (1,))
    rig.engine.answer = lambda event: [actions.SendFrame("n1", arrived)]
    rig.membership.answer = lambda event: [
        membership_actions.TellEngine(events.RanksLeft(GROUP, (1,))),
        membership_actions.SendFrame("n1", left),
    ]
    rig.driver.membership_event(membership_events.ClientLeaving(101, GROUP))
    assert rig.peers.frames == [("n1", arrived), ("n1", left)]


async def test_a_frozen_engine_and_one_that_gives_up_are_told_to_the_memberships(rig: Rig) -> None:
    frozen = actions.Frozen(GROUP, 3, (PeerResult("x", 0, (0,)),), (), 4, ())
    error = InvalidArgument("no")
    rig.do(frozen, actions.GiveUp(GROUP, error))
    assert rig.membership.events == [membership_events.Frozen(frozen), membership_events.GiveUp(GROUP, error)]


async def test_a_change_of_generation_reaches_the_engine_and_its_answer_the_memberships(rig: Rig) -> None:
    freeze, frozen = events.Freeze(GROUP, 1), actions.Frozen(GROUP, 1, (), (), 0, ())
    rig.engine.answer = lambda event: [frozen] if event == freeze else ()
    rig.membership.answer = lambda event: (
        [membership_actions.TellEngine(freeze)] if isinstance(event, membership_events.LinkLost) else ()
    )
    rig.driver.membership_event(membership_events.LinkLost("n1"))
    assert rig.engine.events == [freeze]
    assert rig.membership.events == [membership_events.LinkLost("n1"), membership_events.Frozen(frozen)]
