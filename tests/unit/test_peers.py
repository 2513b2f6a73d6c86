"""Links between agents: one per pair, watched, dialled again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field

import pytest
from tests.support.virtual_loop import VirtualLoop, run_virtually

from allreduced.core.errors import AgentUnavailable, AuthenticationError, ConfigError, PeerLost, ProtocolError
from allreduced.core.identity import GroupKey
from allreduced.daemon.diallers import reached
from allreduced.daemon.engine.events import Event as EngineEvent
from allreduced.daemon.engine.events import Heard
from allreduced.daemon.membership.events import Event as MembershipEvent
from allreduced.daemon.membership.events import FrameArrived, LinkLost, PeerDown, PeerUp
from allreduced.daemon.peer_link import Target
from allreduced.daemon.peers import LOST_SHOWN, Peers
from allreduced.daemon.timing import derived
from allreduced.protocol.handshake import HIGHEST_VERSION, LOWEST_VERSION, SecretAuthenticator
from allreduced.protocol.peer import Retract, StatusFrame, StatusRequest
from allreduced.transports.base import Link, LinkOptions, Listener
from allreduced.transports.inproc import InprocLink, InprocListener
from allreduced.transports.registry import transport

KEY = GroupKey(0, "job", "world")


@dataclass
class Sink:
    """Records what the driver would be told."""

    happened: list[MembershipEvent] = field(default_factory=list)
    engine: list[EngineEvent] = field(default_factory=list)
    landed: list[tuple[int, int, int, int]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    over: list[Link] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    skew: float = 0.0

    def engine_event(self, event: EngineEvent) -> None:
        self.engine.append(event)
        self.changed.set()

    def membership_event(self, event: MembershipEvent) -> None:
        self.happened.append(event)
        self.changed.set()

    def now(self) -> float:
        return asyncio.get_running_loop().time() + self.skew

    def received(self, link: Link, receive: int, offset: int, nbytes: int, tag: int) -> None:
        self.landed.append((receive, offset, nbytes, tag))
        self.changed.set()

    def receive_cancelled(self, link: Link, receive: int) -> None:
        self.freed.append(receive)
        self.changed.set()

    def sent(self, link: Link, send: int) -> None:
        self.freed.append(send)
        self.changed.set()

    def closed(self, link: Link) -> None:
        self.over.append(link)
        self.changed.set()

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            self.changed.clear()
            await self.changed.wait()

    def peers(self) -> list[str]:
        """Return who is up, by what was told."""
        up: set[str] = set()
        for event in self.happened:
            if isinstance(event, PeerUp):
                assert event.node not in up
                up.add(event.node)
            elif isinstance(event, PeerDown | LinkLost):
                up.discard(event.node)
        return sorted(up)

    def told(self) -> list[MembershipEvent]:
        """Return what was told about peers, without what they sent."""
        return [event for event in self.happened if not isinstance(event, FrameArrived)]

    def downs(self) -> list[PeerDown]:
        return [event for event in self.happened if isinstance(event, PeerDown)]


@dataclass
class Node:
    sink: Sink
    peers: Peers
    listener: Listener

    @property
    def address(self) -> str:
        return self.listener.address


Start = Callable[..., Awaitable[Node]]


async def make_node(
    name: str,
    incarnation: int,
    *,
    timeout: float = 60.0,
    secret: bytes = b"",
    watch: bool = True,
    advertise: bool = True,
    versions: tuple[int, int] = (LOWEST_VERSION, HIGHEST_VERSION),
    listen: str = "inproc://{}:0",
) -> Node:
    sink, timing = Sink(), derived(timeout)
    lowest, highest = versions
    options = LinkOptions(
        authenticator=SecretAuthenticator(name, incarnation, secret, lowest=lowest, highest=highest),
        connect_timeout=timing.connect,
        handshake_timeout=timing.connect,
    )
    peers = Peers(name, incarnation, sink, options, transport, timing=timing)
    node = Node(sink, peers, await peers.listen(listen.format(name)))
    if watch:
        peers.start(node.address if advertise else "")
    return node


async def end(nodes: Iterable[Node]) -> None:
    for node in nodes:
        await node.listener.close()
    for node in nodes:
        await node.peers.close(1.0)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    nodes: list[Node] = []

    async def make(
        name: str, incarnation: int = 0, *, timeout: float = 60.0, secret: bytes = b"", watch: bool = True
    ) -> Node:
        node = await make_node(name, incarnation or len(nodes) + 1, timeout=timeout, secret=secret, watch=watch)
        nodes.append(node)
        return node

    yield make
    await end(nodes)


async def both_up(one: Node, other: Node, one_name: str = "a", other_name: str = "b") -> None:
    await one.sink.until(lambda: other_name in one.sink.peers())
    await other.sink.until(lambda: one_name in other.sink.peers())


def virtually(test: Callable[[], Coroutine[object, object, None]]) -> Callable[[], None]:
    """Run a test in virtual time."""

    def run() -> None:
        run_virtually(test())

    run.__name__ = test.__name__
    return run


def cut(node: Node, other: str) -> None:
    """Cut the link that is in use, as a network does."""
    link = node.peers.link(other)
    assert link is not None
    link.abort(AgentUnavailable("cut by the test"))


async def kill(node: Node) -> None:
    """End an agent as the kernel does: nothing is said, and its address refuses connections."""
    await node.peers._diallers.close()
    node.peers._closing = True
    await node.listener.close()
    for link in list(node.peers._links):
        link.link.abort(AgentUnavailable("killed by the test"))


def set_mute(*nodes: Node, mute: bool = True) -> None:
    """Let nobody be answered who dials, or everybody again."""
    for node in nodes:
        assert isinstance(node.listener, InprocListener)
        node.listener.mute = mute


def stop_sending(node: Node) -> None:
    """Let an agent that is stopped send nothing more, while its connections stay."""
    node.peers._watch.close()


def half_open(node: Node, other: str) -> None:
    """Let only this side lose the connection."""
    link = node.peers.link(other)
    assert isinstance(link, InprocLink)
    far = link.other
    far.broken = lambda reason: None  # type: ignore[method-assign]
    link.abort(AgentUnavailable("cut by the test, on this side only"))


def heard(sink: Sink) -> list[str]:
    """Return of whom the engine heard last."""
    events = [event for event in sink.engine if isinstance(event, Heard)]
    return list(events[-1].nodes) if events else [""]


async def until_logged(caplog: pytest.LogCaptureFixture, *parts: str) -> None:
    """Return once a line has all the parts."""
    async with asyncio.timeout(10.0):
        while not any(all(part in record.getMessage() for part in parts) for record in caplog.records):  # noqa: ASYNC110 # a log sets no event
            await asyncio.sleep(0.001)


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
        patch.setattr("allreduced.daemon.diallers.same_host", lambda address, remote: False)
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


async def test_a_refusal_at_an_address_that_may_be_somebody_elses_proves_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allreduced.daemon.diallers.same_host", lambda address, remote: False)
    a, b = await start("a"), await start("b")
    b.peers.dial(Target(a.address))  # a was dialled, and has never reached b at the address that b tells
    await both_up(a, b)
    await a.sink.until(lambda: a.peers.view()[0].address == b.address)
    await kill(b)
    await a.sink.until(lambda: LinkLost("b") in a.sink.told())
    (dialler,) = a.peers._diallers.active
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await dialler.first_result()
    assert a.sink.downs() == []


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


async def test_heartbeats_keep_an_idle_link(start: Start) -> None:
    a, b = await start("a", timeout=0.4), await start("b", timeout=0.4)
    a.peers.dial(Target(b.address, "b"))
    await both_up(a, b)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):  # longer than the failure timeout, with nothing but heartbeats
            await a.sink.until(lambda: bool(a.sink.downs() or b.sink.downs()))


@virtually
async def test_silence_is_noticed_when_the_timeout_is_over_and_not_later() -> None:
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
    await until_logged(caplog, "event=link_refused node=a", "is the name used twice")
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


async def test_agents_with_a_common_version_speak_it(start: Start) -> None:
    a, b = await make_node("a", 9, versions=(1, 3)), await start("b")
    a.peers.dial(Target(b.address))
    await both_up(a, b)
    await end([a])


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


async def test_agents_without_a_link_are_told_with_the_reason(start: Start) -> None:
    a, b = await start("a", timeout=0.2), await start("b", watch=False)
    a.peers.dial(Target("inproc://nobody:7"))
    a.peers.dial(Target("inproc://c:7", "c"))
    unreachable = (
        ("c", "it cannot be reached at inproc://c:7"),
        ("", "it cannot be reached at inproc://nobody:7"),
    )
    assert a.peers.not_reached() == unreachable
    a.peers.dial(Target(b.address, "b"))
    await a.sink.until(lambda: "b" in a.sink.peers())
    assert a.peers.not_reached() == unreachable
    await a.sink.until(lambda: "b" in dict(a.peers.not_reached()))  # it is silent
    assert "ago: agent 'b' was silent for" in dict(a.peers.not_reached())["b"]
    a.sink.skew += LOST_SHOWN
    assert dict(a.peers.not_reached()).get("b", "it cannot be reached").startswith("it cannot be reached")
