"""Links between agents: one per pair, watched, dialled again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from allreduced.core.errors import AuthenticationError, ConfigError, PeerLost
from allreduced.core.identity import GroupKey
from allreduced.daemon.engine.events import Event as EngineEvent
from allreduced.daemon.membership.events import Event as MembershipEvent
from allreduced.daemon.membership.events import FrameArrived, PeerDown, PeerUp
from allreduced.daemon.peer_link import Target
from allreduced.daemon.peers import LOST_SHOWN, Peers, reached
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.protocol.peer import Retract, StatusFrame, StatusRequest
from allreduced.transports.base import Link, LinkOptions, Listener
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
            elif isinstance(event, PeerDown):
                up.remove(event.node)
        return sorted(up)

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


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    nodes: list[Node] = []

    async def make(
        name: str, incarnation: int = 0, *, timeout: float = 60.0, secret: bytes = b"", watch: bool = True
    ) -> Node:
        sink = Sink()
        number = incarnation or len(nodes) + 1
        options = LinkOptions(authenticator=SecretAuthenticator(name, number, secret))
        peers = Peers(name, number, sink, options, transport, failure_timeout=timeout)
        node = Node(sink, peers, await peers.listen(f"inproc://{name}:0"))
        if watch:
            peers.start(node.address)
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        await node.listener.close()
    for node in nodes:
        await node.peers.close(1.0)


async def both_up(one: Node, other: Node, one_name: str = "a", other_name: str = "b") -> None:
    await one.sink.until(lambda: other_name in one.sink.peers())
    await other.sink.until(lambda: one_name in other.sink.peers())


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


async def test_a_cut_link_is_a_lost_peer_and_dialled_again(start: Start) -> None:
    a, b = await start("a", timeout=1.0), await start("b", timeout=1.0)
    a.peers.dial(Target(b.address, "b"))
    await both_up(a, b)
    link = a.peers.link("b")
    assert link is not None
    link.abort(PeerLost("cut by the test"))
    for node, other in ((a, "b"), (b, "a")):
        await node.sink.until(lambda node=node: len(node.sink.downs()) == 1)  # type: ignore[misc]
        error = node.sink.downs()[0].error
        assert isinstance(error, PeerLost)
        assert node.sink.downs()[0].node == other
    await both_up(a, b)


async def test_a_goodbye_is_no_loss(start: Start) -> None:
    a, b = await start("a"), await start("b")
    a.peers.dial(Target(b.address, "b"))
    await both_up(a, b)
    await b.listener.close()
    await b.peers.close(5.0)
    await a.sink.until(lambda: a.sink.downs() == [PeerDown("b", None)])


async def test_a_silent_peer_is_lost(start: Start) -> None:
    a, b = await start("a", timeout=0.2), await start("b", watch=False)
    a.peers.dial(Target(b.address, "b"))
    await a.sink.until(lambda: len(a.sink.downs()) == 1)
    assert "silent for" in str(a.sink.downs()[0].error)


async def test_heartbeats_keep_an_idle_link(start: Start) -> None:
    a, b = await start("a", timeout=0.4), await start("b", timeout=0.4)
    a.peers.dial(Target(b.address, "b"))
    await both_up(a, b)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):  # longer than the failure timeout, with nothing but heartbeats
            await a.sink.until(lambda: bool(a.sink.downs() or b.sink.downs()))


async def test_time_in_which_the_agent_itself_was_held_up_is_not_charged(start: Start) -> None:
    a, b = await start("a", timeout=30.0), await start("b", timeout=30.0)
    a.peers.dial(Target(b.address, "b"))
    await both_up(a, b)
    (view,) = a.peers.view()
    assert view.silence < 30.0
    link = next(iter(a.peers._links))
    a.sink.skew = 100.0  # the clock jumps, as after SIGSTOP
    assert link.silence(a.sink.now()) > 30.0
    link.forgive(100.0)
    assert link.silence(a.sink.now()) < 30.0


async def test_a_later_start_of_an_agent_takes_its_place(start: Start) -> None:
    a, old = await start("a"), await start("b", 5)
    a.peers.dial(Target(old.address, "b"))
    await both_up(a, old)
    new = await start("b", 6)
    new.peers.dial(Target(a.address, "a"))
    await new.sink.until(lambda: new.sink.peers() == ["a"])
    assert [event for event in a.sink.happened if not isinstance(event, FrameArrived)][:3] == [
        PeerUp("b", 5),
        PeerDown("b", a.sink.downs()[0].error),
        PeerUp("b", 6),
    ]
    assert "started anew" in str(a.sink.downs()[0].error)


async def test_an_agent_listed_under_another_name_is_refused(start: Start) -> None:
    a, b = await start("a"), await start("b")
    with pytest.raises(ConfigError, match="called 'b', not 'c'"):
        await reached([a.peers.dial(Target(b.address, "c"))], 10.0)
    assert a.sink.peers() == []


async def test_an_agent_with_the_same_name_is_refused(start: Start) -> None:
    a, twin = await start("a"), await start("a")
    with pytest.raises(ConfigError, match="like this one"):
        await reached([a.peers.dial(Target(twin.address))], 10.0)


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
    await a.sink.until(lambda: len(a.sink.downs()) == 1)
    assert a.sink.downs()[0].node == "b"
    assert c.sink.downs() == []


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
    assert a.sink.downs() == b.sink.downs() == []


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
