"""Links between agents: one per pair, whoever dials, and whom an agent refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.support.peer_nodes import KEY, Start, both_up, end, make_node, starting, until_logged
from tests.support.virtual_loop import run_virtually

from allreduced.core.errors import AuthenticationError, ConfigError, ProtocolError
from allreduced.daemon.diallers import reached
from allreduced.daemon.membership.events import FrameArrived, LinkLost, PeerUp
from allreduced.daemon.peer_link import Target
from allreduced.protocol.peer import Load, LoadFrame, Retract, StatusFrame, StatusRequest


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with starting() as start:
        yield start


@pytest.mark.parametrize("diallers", ["a", "b", "ab"])
async def test_two_agents_have_exactly_one_link_whoever_dials(start: Start, diallers: str) -> None:
    a, b = await start("a"), await start("b")
    if "a" in diallers:
        a.peers.dial(Target(b.address, "b"))
    if "b" in diallers:
        b.peers.dial(Target(a.address, "a"))
    await both_up(a, b)
    for number in range(5):
        a.peers.send_frame("b", Retract(KEY, number))
        b.peers.send_frame("a", Retract(KEY, number))
    await a.sink.until(lambda: FrameArrived("b", Retract(KEY, 4)) in a.sink.happened)
    await b.sink.until(lambda: FrameArrived("a", Retract(KEY, 4)) in b.sink.happened)
    assert [event for event in b.sink.happened if isinstance(event, FrameArrived)] == [
        FrameArrived("a", Retract(KEY, number)) for number in range(5)
    ]
    assert a.sink.downs() == b.sink.downs() == []
    assert [view.node for view in a.peers.view()] == ["b"]


async def test_data_goes_over_the_chosen_link(start: Start) -> None:
    a, b = await start("a"), await start("b")
    b.peers.dial(Target(a.address))
    await both_up(a, b)
    into = bytearray(4)
    there, here = b.peers.link("a"), a.peers.link("b")
    assert there is not None
    assert here is not None
    token = there.post_receive(7, memoryview(into))
    here.send(9, token, 0, memoryview(b"data"), tag=3)
    await b.sink.until(lambda: (7, 0, 4, 3) in b.sink.landed)
    await a.sink.until(lambda: 9 in a.sink.freed)
    assert into == b"data"


async def test_agents_hear_of_each_other_from_one_that_they_know(start: Start) -> None:
    nodes = {name: await start(name, timeout=2.0) for name in ("h", "a", "z", "m")}
    for name in "azm":
        nodes[name].peers.dial(Target(nodes["h"].address))
    for name, node in nodes.items():
        await node.sink.until(lambda name=name, node=node: node.sink.peers() == sorted(set("hazm") - {name}))  # type: ignore[misc]


@pytest.mark.parametrize("name", ["b", "A"])
def test_an_agent_with_the_name_of_another_does_not_push_it_out_and_both_logs_say_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        a = await make_node("a", 1, timeout=8.0)
        first, second = await make_node(name, 5, timeout=8.0), await make_node(name, 6, timeout=8.0)
        first.peers.dial(Target(a.address))
        await both_up(a, first, other_name=name)
        second.peers.dial(Target(a.address))
        await asyncio.sleep(20.0)
        assert a.sink.told() == [PeerUp(name, 5)]
        await end([second])
        caplog.clear()
        earlier = await make_node(name, 4, timeout=8.0)
        earlier.peers.dial(Target(a.address))
        await asyncio.sleep(20.0)
        assert a.sink.told() == [PeerUp(name, 5)]
        await end([a, first, earlier])
        assert "started later is known" in caplog.text

    run_virtually(run())
    refused = [record.message for record in caplog.records if "event=agent_refused" in record.message]
    told = [record.message for record in caplog.records if "event=turned_away" in record.message]
    assert refused
    assert told
    assert all("is the name used twice" in line for line in refused + told)


async def test_an_agent_listed_under_another_name_is_refused(start: Start) -> None:
    a, b = await start("a"), await start("b")
    with pytest.raises(ConfigError, match="called 'b', not 'c'"):
        await reached([a.peers.dial(Target(b.address, "c"))], 10.0)
    assert a.sink.peers() == []


@pytest.mark.parametrize("listen", ["inproc://{}:0", "tcp://127.0.0.1:0"])
async def test_an_agent_with_the_same_name_is_refused_and_both_logs_say_so(
    listen: str, caplog: pytest.LogCaptureFixture
) -> None:
    a, twin = await make_node("a", 1, listen=listen), await make_node("a", 2, listen=listen)
    with pytest.raises(ConfigError, match="like this one"):
        await reached([a.peers.dial(Target(twin.address))], 10.0)
    await until_logged(caplog, "event=link_refused peer=a", "is the name used twice")
    await until_logged(caplog, "event=not_reached", "is the name used twice")
    await end([a, twin])


@pytest.mark.parametrize(("mine", "theirs"), [((1, 1), (2, 3)), ((3, 4), (1, 2))])
async def test_agents_without_a_common_version_refuse_each_other_and_both_logs_name_both_ranges(
    mine: tuple[int, int], theirs: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    listen = "tcp://127.0.0.1:0"
    a, b = (
        await make_node("a", 1, versions=mine, listen=listen),
        await make_node("b", 2, versions=theirs, listen=listen),
    )
    with pytest.raises(ProtocolError, match="one apart"):
        await reached([a.peers.dial(Target(b.address))], 10.0)
    here, there = (f"{lowest} to {highest}" for lowest, highest in (mine, theirs))
    await until_logged(caplog, "event=not_reached", f"speaks versions {there}", f"this agent {here}")
    await until_logged(caplog, "event=connection_dropped", f"speaks versions {here}", f"this agent {there}")
    assert a.sink.happened == b.sink.happened == []
    await end([a, b])


@pytest.mark.parametrize(("highest", "spoken"), [(3, 2), (2, 2), (1, 1)])
@pytest.mark.parametrize("listen", ["inproc://{}:0", "tcp://127.0.0.1:0"], ids=["inproc", "tcp"])
async def test_agents_with_a_common_version_speak_it_and_withhold_what_came_later(
    listen: str, highest: int, spoken: int
) -> None:
    a, b = await make_node("a", 9, versions=(1, highest), listen=listen), await make_node("b", 2, listen=listen)
    loads: list[tuple[str, LoadFrame]] = []
    a.peers.on_load = lambda peer, frame: loads.append((peer, frame))
    a.peers.dial(Target(b.address))
    await both_up(a, b)
    assert [peer.version for node in (a, b) for peer in node.peers.view()] == [spoken, spoken]
    b.peers.send_frame("a", Load(7, b"data"))
    b.peers.send_frame("a", Retract(KEY, 1))  # what was sent before has come with it
    await a.sink.until(lambda: FrameArrived("b", Retract(KEY, 1)) in a.sink.happened)
    assert loads == ([("b", Load(7, b"data"))] if spoken >= 2 else [])
    await end([a, b])


async def test_another_secret_is_told_to_who_waits(start: Start) -> None:
    a, b = await start("a", secret=b"one"), await start("b", secret=b"two")
    with pytest.raises(AuthenticationError):
        await reached([a.peers.dial(Target(b.address))], 10.0)


async def test_a_frame_that_is_none_ends_that_link_only(start: Start) -> None:
    a, b, c = await start("a"), await start("b"), await start("c")
    a.peers.dial(Target(b.address, "b"))
    a.peers.dial(Target(c.address, "c"))
    await both_up(a, b)
    await both_up(a, c, other_name="c")
    link = b.peers.link("a")
    assert link is not None
    link.send_control(b"garbage")
    await a.sink.until(lambda: a.sink.told()[-2:] == [LinkLost("b"), PeerUp("b", 2)])
    assert LinkLost("c") not in a.sink.told()
    assert LinkLost("a") not in c.sink.told()


async def test_questions_for_the_status_and_answers_are_handed_on(start: Start) -> None:
    a, b = await start("a"), await start("b")
    told: list[tuple[str, StatusFrame]] = []
    came = asyncio.Event()

    def on_status(node: str, frame: StatusFrame) -> None:
        told.append((node, frame))
        came.set()

    b.peers.on_status = on_status
    a.peers.dial(Target(b.address, "b"))
    await both_up(a, b)
    b.peers.send_frame("a", StatusRequest(1, 1000))  # a does not tell any: that is no fault of b's
    a.peers.send_frame("b", StatusRequest(2, 1001))
    await came.wait()
    assert told == [("a", StatusRequest(2, 1001))]
    assert len(a.sink.told()) == len(b.sink.told()) == 1
