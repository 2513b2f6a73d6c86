"""Agents that are listed now and not later: who is dialled, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.support.peer_nodes import Start, both_up, cut, end, make_node, starting

from allreduced.daemon.discovery_port import Listing
from allreduced.daemon.membership.events import LinkLost, PeerUp
from allreduced.daemon.peer_link import Target


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with starting() as made:
        yield made


def listed(*addresses: str, own: str = "", problem: str = "") -> Listing:
    return Listing(frozenset(Target(address) for address in addresses), own, problem)


async def test_who_is_new_in_the_listing_is_dialled_by_an_unknown_name(start: Start) -> None:
    a, b, c = await start("a"), await start("b"), await start("c")
    a.peers.keep_to(listed(b.address))
    await both_up(a, b)
    a.peers.keep_to(listed(b.address, c.address))
    await both_up(a, c, "a", "c")
    await both_up(b, c, "b", "c")  # whom a tells of each other


async def test_who_is_listed_no_more_is_not_dropped_while_the_link_lives(start: Start) -> None:
    a, b = await start("a"), await make_node("b", 2, advertise=False)
    a.peers.keep_to(listed(b.address))
    await both_up(a, b)
    (dialler,) = a.peers._diallers.active
    a.peers.keep_to(listed())
    assert a.sink.peers() == ["b"]
    assert not dialler.done
    cut(a, "b")
    await a.sink.until(lambda: a.sink.told() == [PeerUp("b", 2), LinkLost("b")])
    await asyncio.wait([dialler._task])
    assert a.peers._diallers.active == ()  # b told no address of its own, and dials a itself when it comes back
    b.peers.dial(Target(a.address, "a"))
    await a.sink.until(lambda: a.sink.peers() == ["b"])
    await end([b])


async def test_who_said_where_it_is_is_dialled_back_though_it_is_listed_no_more(start: Start) -> None:
    a, b = await start("a"), await start("b")
    a.peers.keep_to(listed(b.address))
    await both_up(a, b)
    await a.sink.until(lambda: a.peers.view()[0].address == b.address)
    a.peers.keep_to(listed())
    for dialler in b.peers._diallers.active:
        await dialler.close()
    cut(a, "b")
    await a.sink.until(lambda: a.sink.told() == [PeerUp("b", 2), LinkLost("b"), PeerUp("b", 2)])


async def test_who_is_listed_again_before_the_link_ends_is_dialled_again(start: Start) -> None:
    a, b = await start("a"), await make_node("b", 2, advertise=False)
    a.peers.keep_to(listed(b.address))
    await both_up(a, b)
    a.peers.keep_to(listed())
    a.peers.keep_to(listed(b.address))
    cut(a, "b")
    await a.sink.until(lambda: a.sink.told() == [PeerUp("b", 2), LinkLost("b"), PeerUp("b", 2)])
    await end([b])


async def test_who_cannot_be_reached_is_given_up_as_soon_as_it_is_not_listed(start: Start) -> None:
    a = await start("a")
    a.peers.keep_to(listed("inproc://nobody"))
    (dialler,) = a.peers._diallers.active
    assert not dialler.done
    a.peers.keep_to(listed())
    await asyncio.wait([dialler._task])
    assert a.peers.not_reached() == ()


async def test_this_agent_itself_is_found_out_and_dialled_once_only(start: Start) -> None:
    a, b = await start("a"), await start("b")
    a.peers.keep_to(listed(a.address))
    (dialler,) = a.peers._diallers.active
    await asyncio.wait([dialler._task])
    a.peers.keep_to(listed(a.address, b.address))
    await both_up(a, b)
    assert [dialler.target.address for dialler in a.peers._diallers.active if dialler.target.node == ""] == [b.address]


async def test_where_this_agent_is_found_is_told_to_others_once_it_is_known(start: Start) -> None:
    a, b = await make_node("a", 7, advertise=False), await start("b")
    a.peers.keep_to(listed(b.address))
    await both_up(a, b)
    assert b.peers.view()[0].address == ""
    a.peers.keep_to(listed(b.address, own=a.address))
    async with asyncio.timeout(10.0):
        while b.peers.view()[0].address != a.address:  # noqa: ASYNC110 # nothing is told to the driver
            await asyncio.sleep(0.001)
    await end([a])


async def test_why_nobody_is_found_is_shown(start: Start) -> None:
    a, b = await start("a"), await start("b")
    a.peers.keep_to(listed(problem="the name agents:4123 is not known: no such name"))
    assert a.peers.not_reached() == (("", "the name agents:4123 is not known: no such name"),)
    a.peers.keep_to(listed(b.address))
    await both_up(a, b)
    assert a.peers.not_reached() == ()
