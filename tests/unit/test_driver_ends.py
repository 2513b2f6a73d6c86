"""How the driver ends things: what a defect touches, and all that is in flight when the agent stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from tests.support.driver_rig import GROUP, Rig, given_up, reduce, rigged, submitted

from allreduced.core.errors import AgentUnavailable, InternalError, InvalidArgument
from allreduced.core.identity import GroupKey
from allreduced.daemon.engine import actions, events
from allreduced.daemon.engine.region import FIRST_ENGINE_BUFFER as RESULT
from allreduced.daemon.engine.region import Region
from allreduced.daemon.membership import events as membership_events
from allreduced.protocol.change import Trouble


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with rigged() as rig:
        yield rig


async def test_a_defect_in_the_engine_ends_the_operation_and_its_group_only(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.form()
    rig.form(GROUP + 1)

    def defect(event: object) -> Sequence[object]:
        if isinstance(event, events.Submitted):
            raise RuntimeError("boom")
        return ()

    rig.engine.answer = defect
    rig.clients.told.clear()
    rig.driver.engine_event(submitted())
    assert rig.clients.told == [
        ("group_ended", (100, 101), GROUP, InternalError),
        ("failed", 100, 1, InternalError),
    ]
    assert [event.group for event in rig.engine.events if isinstance(event, events.GroupBroken)] == [GROUP]
    assert given_up(rig) == [(GROUP, InternalError)]  # so that the other nodes learn of it
    assert "boom" in caplog.text
    rig.driver.engine_event(events.ClientGone(5))
    assert rig.engine.events[-1] == events.ClientGone(5)


async def test_an_action_that_cannot_be_done_breaks_its_group_and_frees_its_memory(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.buffers()
    rig.form()
    rig.form(GROUP + 1)
    rig.clients.told.clear()
    rig.engine.events.clear()
    rig.kernels.fails = True
    rig.do(reduce(1, 8))
    broken, reduced = rig.engine.events
    assert isinstance(broken, events.GroupBroken)
    assert broken.group == GROUP
    assert reduced == events.Reduced(1)
    rig.do(reduce(2, 8, Region(999, 0, 8)))
    assert rig.clients.told == [
        ("group_ended", (100, 101), GROUP, InternalError),
        ("group_ended", (100, 101), GROUP + 1, InternalError),
    ]
    assert given_up(rig) == [(GROUP, InternalError), (GROUP + 1, InternalError)]
    assert "unknown reduction" in caplog.text


async def test_a_defect_in_the_memberships_refuses_the_join(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def defect(event: object) -> Sequence[object]:
        raise RuntimeError("boom")

    rig.membership.answer = defect
    key = GroupKey(0, "j", "world")
    rig.driver.membership_event(membership_events.ClientJoining(100, 3, key, 1, 0, 0, 1, 1e9))
    assert rig.clients.told == [("failed", 100, 3, InternalError)]
    assert "boom" in caplog.text


@pytest.mark.parametrize(
    ("event", "ended"),
    [
        (membership_events.PeerDown("n1", None), [GROUP, GROUP + 1]),
        (membership_events.TimePassed(), [GROUP, GROUP + 1]),
        (membership_events.ClientGone(100), [GROUP, GROUP + 1]),
        (membership_events.ClientGone(77), []),
        (membership_events.FrameArrived("n1", Trouble(GROUP + 1, 1, ())), [GROUP + 1]),
        (membership_events.Frozen(actions.Frozen(GROUP, 1, (), (), 0, ())), [GROUP]),
        (membership_events.GiveUp(GROUP, InvalidArgument("no")), []),
    ],
)
async def test_a_defect_in_the_memberships_ends_what_would_wait_for_ever(
    rig: Rig, event: membership_events.Event, ended: list[int]
) -> None:
    rig.form()
    rig.form(GROUP + 1)

    def defect(event: object) -> Sequence[object]:
        raise RuntimeError("boom")

    rig.membership.answer = defect
    rig.driver.membership_event(event)
    assert [broken.group for broken in rig.engine.events if isinstance(broken, events.GroupBroken)] == ended
    assert [told[2] for told in rig.clients.told if told[0] == "group_ended"] == ended


async def test_drain_refuses_new_work_and_waits_for_what_is_in_flight(rig: Rig) -> None:
    await rig.buffers()
    link = rig.link("n1")
    rig.driver.engine_event(submitted())
    rig.do(actions.Send(8, "n1", b"t", 0, Region(RESULT, 0, 32), 0, 0), reduce(1, 1 << 17))
    drained = asyncio.create_task(rig.driver.drain(30))
    await asyncio.sleep(0)
    rig.driver.engine_event(submitted(2))
    key = GroupKey(0, "j", "world")
    rig.driver.membership_event(membership_events.ClientJoining(100, 3, key, 1, 0, 0, 1, 1e9))
    assert rig.clients.told == [("failed", 100, 2, AgentUnavailable), ("failed", 100, 3, AgentUnavailable)]
    rig.do(actions.Deliver(100, 1, None, 0, (), "", 0.0))
    rig.driver.sent(link, 8)
    await asyncio.sleep(0)
    assert not drained.done()
    rig.kernels.complete(1)
    assert await drained is True


async def test_drain_waits_for_what_is_owed_to_other_nodes(rig: Rig) -> None:
    rig.engine.idle = False
    drained = asyncio.create_task(rig.driver.drain(30))

    def answer(event: object) -> Sequence[object]:
        rig.engine.idle = event == events.Sent(9)
        return ()

    rig.engine.answer = answer
    rig.driver.engine_event(events.Sent(8))
    await asyncio.sleep(0)
    assert not drained.done()
    rig.driver.engine_event(events.Sent(9))
    assert await drained is True


async def test_drain_gives_up_in_time(rig: Rig) -> None:
    rig.driver.engine_event(submitted())
    assert await rig.driver.drain(0.01) is False


async def test_what_is_in_flight_when_drain_gives_up_fails_before_the_others_hear_a_goodbye(rig: Rig) -> None:
    rig.form()
    rig.driver.engine_event(submitted())
    assert await rig.driver.drain(0.01) is False
    (broken,) = [event for event in rig.engine.events if isinstance(event, events.GroupBroken)]
    assert (broken.group, type(broken.error)) == (GROUP, AgentUnavailable)
    assert given_up(rig) == [(GROUP, AgentUnavailable)]
