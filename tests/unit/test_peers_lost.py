"""Links that end and agents that die: what is dialled again, what is proven, and what is silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.support.peer_nodes import (
    KEY,
    Start,
    both_up,
    cut,
    end,
    half_open,
    heard,
    kill,
    make_node,
    set_mute,
    starting,
    stop_sending,
    virtually,
)
from tests.support.virtual_loop import VirtualLoop, run_virtually

from allreduced.core.errors import PeerLost
from allreduced.daemon.engine.events import Heard
from allreduced.daemon.membership.events import FrameArrived, LinkLost, PeerDown, PeerUp
from allreduced.daemon.peer_link import Target
from allreduced.daemon.peers import LOST_SHOWN
from allreduced.protocol.peer import Retract


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with starting() as start:
        yield start


async def test_a_cut_link_is_dialled_again_at_once_and_nobody_is_dead(start: Start) -> None:
    a, b = await start("a"), await start("b")
    a.peers.dial(Target(b.address, "b"))
    await both_up(a, b)
    cut(a, "b")
    for node, other, incarnation in ((a, "b", 2), (b, "a", 1)):
        expected = [PeerUp(other, incarnation), LinkLost(other), PeerUp(other, incarnation)]
        await node.sink.until(lambda node=node, expected=expected: node.sink.told() == expected)  # type: ignore[misc]


async def test_whoever_knows_an_address_brings_a_link_back(start: Start) -> None:
    a, b = await start("a"), await make_node("b", 2, advertise=False)  # only b knows where the other one is
    b.peers.dial(Target(a.address, "a"))
    await both_up(a, b)
    cut(a, "b")
    await a.sink.until(lambda: a.sink.told() == [PeerUp("b", 2), LinkLost("b"), PeerUp("b", 2)])
    await end([b])


async def test_an_agent_that_was_never_dialled_is_dialled_back_where_it_says_that_it_is(start: Start) -> None:
    a, b = await start("a"), await start("b")
    dialler = b.peers.dial(Target(a.address, "a"))
    await both_up(a, b)
    await a.sink.until(lambda: a.peers.view()[0].address == b.address)
    await dialler.close()
    cut(b, "a")
    await b.sink.until(lambda: b.sink.told() == [PeerUp("a", 1), LinkLost("a"), PeerUp("a", 1)])


@pytest.mark.parametrize("dials", ["a", "b"])
async def test_a_refused_connection_proves_that_a_peer_is_dead(start: Start, dials: str) -> None:
    a, b = await start("a"), await start("b")
    (a if dials == "a" else b).peers.dial(Target(b.address if dials == "a" else a.address))
    await both_up(a, b)
    await a.sink.until(lambda: a.peers.view()[0].address == b.address)
    await kill(b)
    await a.sink.until(lambda: len(a.sink.downs()) == 1)
    assert a.sink.told()[:2] == [PeerUp("b", 2), LinkLost("b")]
    (down,) = a.sink.downs()
    assert down.proven
    assert isinstance(down.error, PeerLost)
    assert down.error.nodes == ("b",)
    assert "refuses connections" in down.error.message


@virtually
async def test_a_listed_address_is_tried_also_if_its_agent_dialled_first_so_that_its_refusal_proves_something() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("allreduced.daemon.homes.same_host", lambda address, remote: False)
        for first, second in ("ab", "ba"):
            nodes = {name: await make_node(name, at, timeout=8.0) for at, name in enumerate("ab", 1)}
            nodes[second].peers.dial(Target(nodes[first].address, first))
            await both_up(nodes["a"], nodes["b"])
            nodes[first].peers.dial(Target(nodes[second].address, second))
            await asyncio.sleep(4.0)
            assert len(nodes[first].sink.told()) == len(nodes[second].sink.told()) == 1
            await kill(nodes[second])
            sink = nodes[first].sink
            await sink.until(lambda sink=sink: len(sink.downs()) == 1)  # type: ignore[misc]
            assert sink.downs()[0].proven
            await end(nodes.values())


@virtually
async def test_who_pauses_before_the_next_try_does_not_when_something_is_new() -> None:
    loop = asyncio.get_running_loop()
    for happens in ("cut", "kill"):
        a = await make_node("a", 1, timeout=600.0)
        a.peers.dial(Target("inproc://late", "b"))
        await asyncio.sleep(300.0)  # by now the pauses have a minute
        b = await make_node("b", 2, timeout=600.0, listen="inproc://late", advertise=False)
        dialler = b.peers.dial(Target(a.address))
        await both_up(a, b)
        since = loop.time()
        if happens == "cut":
            await dialler.close()
            cut(b, "a")
            await a.sink.until(lambda a=a: a.sink.told() == [PeerUp("b", 2), LinkLost("b"), PeerUp("b", 2)])  # type: ignore[misc]
        else:
            await asyncio.sleep(0.01)
            await kill(b)
            await a.sink.until(lambda a=a: len(a.sink.downs()) == 1)  # type: ignore[misc]
            assert a.sink.downs()[0].proven
        assert loop.time() - since < 1.0
        await end([a, b])


@virtually
async def test_a_refusal_at_an_address_that_may_be_somebody_elses_proves_nothing() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("allreduced.daemon.homes.same_host", lambda address, remote: False)
        a, b = await make_node("a", 1, timeout=8.0), await make_node("b", 2, timeout=8.0)
        b.peers.dial(Target(a.address))  # a was dialled, and has never reached b at the address that b tells
        await both_up(a, b)
        await a.sink.until(lambda: a.peers.view()[0].address == b.address)
        await kill(b)
        await a.sink.until(lambda: LinkLost("b") in a.sink.told())
        await a.sink.until(lambda: len(a.sink.downs()) == 1)
        assert not a.sink.downs()[0].proven
        assert "silent for 8.0 s" in str(a.sink.downs()[0].error)
        await end([a, b])


@pytest.mark.parametrize("listed", [True, False])
def test_an_address_that_refuses_though_its_agent_lives_proves_nothing(*, listed: bool) -> None:
    """As a firewall does that rejects what comes in, on the machine of an agent that dials the others itself."""

    async def run() -> None:
        a, b = await make_node("a", 1, timeout=8.0), await make_node("b", 2, timeout=8.0)
        await b.listener.close()
        if listed:
            a.peers.dial(Target(b.address, "b"))
        b.peers.dial(Target(a.address, "a"))
        await both_up(a, b)
        await asyncio.sleep(4.0)
        for times in range(1, 4):
            cut(a, "b")
            await both_up(a, b)
            await asyncio.sleep(4.0)
            assert a.sink.told() == [PeerUp("b", 2), *[LinkLost("b"), PeerUp("b", 2)] * times]
        await kill(b)
        await a.sink.until(lambda: len(a.sink.downs()) == 1)
        assert not a.sink.downs()[0].proven
        await end([a, b])

    run_virtually(run())


async def test_an_agent_that_is_started_again_at_once_is_found_again_and_its_next_death_proven(start: Start) -> None:
    a, b = await start("a"), await start("b")
    b.peers.dial(Target(a.address))
    await both_up(a, b)
    await a.sink.until(lambda: a.peers.view()[0].address == b.address)
    cut(a, "b")  # so that a dials it as well
    await a.sink.until(lambda: a.sink.told()[-1:] == [PeerUp("b", 2)] and len(a.sink.told()) == 3)
    for incarnation in (7, 8):
        await kill(b)
        b = await make_node("b", incarnation, listen=b.address)
        await a.sink.until(lambda incarnation=incarnation: PeerUp("b", incarnation) in a.sink.told())  # type: ignore[misc]
    await kill(b)
    await a.sink.until(lambda: len(a.sink.downs()) == 3)
    assert all(down.proven for down in a.sink.downs())
    assert a.sink.told()[-1] == a.sink.downs()[-1]


async def test_a_goodbye_is_no_loss(start: Start) -> None:
    a, b = await start("a"), await start("b")
    a.peers.dial(Target(b.address, "b"))
    await both_up(a, b)
    await b.listener.close()
    await b.peers.close(5.0)
    await a.sink.until(lambda: a.sink.downs() == [PeerDown("b", None, proven=True)])


async def test_a_silent_peer_is_lost(start: Start) -> None:
    a, b = await start("a", timeout=0.2), await start("b", watch=False)
    a.peers.dial(Target(b.address, "b"))
    await a.sink.until(lambda: len(a.sink.downs()) == 1)
    assert "silent for" in str(a.sink.downs()[0].error)
    assert not a.sink.downs()[0].proven


@virtually
async def test_heartbeats_keep_an_idle_link_and_silence_is_noticed_when_the_timeout_is_over() -> None:
    loop = asyncio.get_running_loop()
    a, b = await make_node("a", 1, timeout=8.0), await make_node("b", 2, timeout=8.0)
    a.peers.dial(Target(b.address, "b"))
    await both_up(a, b)
    await asyncio.sleep(100.3)
    assert a.sink.downs() == b.sink.downs() == []
    await a.sink.until(lambda: heard(a.sink)[-1] == "b")
    last = b_sent = loop.time()
    stop_sending(b)
    await a.sink.until(lambda: len(a.sink.downs()) == 1)
    assert last + 8.0 - 1.0 <= loop.time() <= b_sent + 8.0 + 0.5
    await end([a, b])


def test_agents_with_different_timeouts_keep_their_link(caplog: pytest.LogCaptureFixture) -> None:
    """As while the setting is changed on one node after the other."""

    async def run() -> None:
        a, b = await make_node("a", 1, timeout=1.0), await make_node("b", 2, timeout=600.0)
        a.peers.dial(Target(b.address, "b"))
        b.peers.dial(Target(a.address, "a"))
        await both_up(a, b)
        await asyncio.sleep(300.0)
        assert (a.sink.told(), b.sink.told()) == ([PeerUp("b", 2)], [PeerUp("a", 1)])
        differ = [record.getMessage() for record in caplog.records if "timeouts_differ" in record.getMessage()]
        assert differ == [
            "event=timeouts_differ peer=a failure_timeout=1 own=600",
            "event=timeouts_differ peer=b failure_timeout=600 own=1",
        ]
        since = asyncio.get_running_loop().time()
        stop_sending(b)
        await a.sink.until(lambda: len(a.sink.downs()) == 1)
        assert asyncio.get_running_loop().time() - since <= 1.0 + 1.0 / 16
        await end([a, b])

    run_virtually(run())


@virtually
async def test_a_cut_link_that_does_not_come_back_is_silence() -> None:
    loop = asyncio.get_running_loop()
    a, b = await make_node("a", 1, timeout=8.0), await make_node("b", 2, timeout=8.0)
    a.peers.dial(Target(b.address, "b"))
    await both_up(a, b)
    await asyncio.sleep(20.25)
    set_mute(a, b)
    cut(a, "b")
    await a.sink.until(lambda: a.sink.told()[-1:] == [LinkLost("b")])
    since = loop.time()
    await a.sink.until(lambda: len(a.sink.downs()) == 1)
    assert since + 7.0 <= loop.time() <= since + 8.5
    assert not a.sink.downs()[0].proven
    assert "after its link ended" in str(a.sink.downs()[0].error)
    set_mute(a, b, mute=False)
    await both_up(a, b)  # it is dialled on
    await end([a, b])


@virtually
async def test_time_in_which_the_agent_itself_was_held_up_is_charged_to_nobody() -> None:
    a, b = await make_node("a", 1, timeout=8.0), await make_node("b", 2, timeout=8.0)
    a.peers.dial(Target(b.address, "b"))
    await both_up(a, b)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    for seconds in (0.4, 1.0, 7.9, 8.0, 100.0, 1e6):
        loop.stall(seconds)
        await asyncio.sleep(3.1)
    assert a.sink.told() == [PeerUp("b", 2)]
    assert b.sink.told() == [PeerUp("a", 1)]
    await end([a, b])


@virtually
async def test_the_engine_hears_of_all_who_were_heard_in_one_event_per_heartbeat_time() -> None:
    loop = asyncio.get_running_loop()
    nodes = [await make_node(name, at, timeout=8.0) for at, name in enumerate("abc", 1)]
    a, b, c = nodes
    for node in (b, c):
        a.peers.dial(Target(node.address))
        await both_up(a, node, other_name=node.peers._node)
    await asyncio.sleep(2.5)
    a.sink.engine.clear()
    since = loop.time()
    while loop.time() < since + 8.0:
        await asyncio.sleep(0.01)
        b.peers.send_frame("a", Retract(KEY, 1))
    events = [event for event in a.sink.engine if isinstance(event, Heard)]
    assert 7 <= len(events) <= 9
    assert {event.nodes for event in events} <= {("b",), ("b", "c")}
    assert sum("c" in event.nodes for event in events) >= 7
    await end(nodes)


@virtually
async def test_a_connection_that_only_one_side_has_lost_is_replaced() -> None:
    for dials, waits in (("a", "b"), ("b", "a")):
        nodes = {name: await make_node(name, at, timeout=8.0) for at, name in enumerate("ab", 1)}
        nodes[dials].peers.dial(Target(nodes[waits].address))
        await both_up(nodes["a"], nodes["b"])
        for sink in (nodes[dials].sink, nodes[waits].sink):
            sink.happened.clear()
        half_open(nodes[dials], waits)
        ups = [PeerUp(name, at) for at, name in enumerate("ab", 1)]
        for name, peer in (("a", ups[1]), ("b", ups[0])):
            sink = nodes[name].sink
            await sink.until(lambda sink=sink, peer=peer: sink.told() == [LinkLost(peer.node), peer])  # type: ignore[misc]
        await end(nodes.values())


@virtually
async def test_a_later_start_of_an_agent_takes_the_place_of_one_that_is_not_heard_any_more() -> None:
    for name, other in (("b", "a"), ("a", "b")):
        a, old = await make_node(other, 1, timeout=8.0), await make_node(name, 5, timeout=8.0, watch=False)
        old.peers.dial(Target(a.address))
        await both_up(a, old, other, name)
        new = await make_node(name, 6, timeout=8.0)
        new.peers.dial(Target(a.address))
        await new.sink.until(lambda new=new, other=other: new.sink.peers() == [other])  # type: ignore[misc]
        new.peers.send_frame(other, Retract(KEY, 7))
        await a.sink.until(lambda a=a, name=name: FrameArrived(name, Retract(KEY, 7)) in a.sink.happened)  # type: ignore[misc]
        (down,) = a.sink.downs()
        assert a.sink.told() == [PeerUp(name, 5), down, PeerUp(name, 6)]
        assert down.proven
        assert "started anew" in str(down.error)
        await end([a, old, new])


async def test_agents_without_a_link_are_told_with_the_reason(start: Start) -> None:
    a, b = await start("a", timeout=0.2), await start("b", watch=False)
    a.peers.dial(Target("inproc://nobody:7"))
    a.peers.dial(Target("inproc://c:7", "c"))
    unreachable = (
        ("c", "it cannot be reached at inproc://c:7"),
        ("", "it cannot be reached at inproc://nobody:7"),
    )
    assert a.peers.not_reached() == unreachable
    refused = (("c", "nobody listens at inproc://c:7"), ("", "nobody listens at inproc://nobody:7"))
    a.peers.dial(Target(b.address, "b"))
    await a.sink.until(lambda: "b" in a.sink.peers())
    assert a.peers.not_reached() == refused
    await a.sink.until(lambda: "b" in dict(a.peers.not_reached()))  # it is silent
    assert "ago: agent 'b' was silent for" in dict(a.peers.not_reached())["b"]
    a.sink.skew += LOST_SHOWN + 1.0
    assert "ago" not in dict(a.peers.not_reached()).get("b", "")
