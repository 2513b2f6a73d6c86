"""Peer planes of several agents in one process, what they tell their driver, and what can happen to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from tests.support.virtual_loop import run_virtually

from allreduced.core.errors import AgentUnavailable
from allreduced.core.identity import GroupKey
from allreduced.daemon.engine.events import Event as EngineEvent
from allreduced.daemon.engine.events import Heard
from allreduced.daemon.membership.events import Event as MembershipEvent
from allreduced.daemon.membership.events import FrameArrived, LinkLost, PeerDown, PeerUp
from allreduced.daemon.peers import Peers
from allreduced.daemon.timing import derived
from allreduced.protocol.handshake import HIGHEST_VERSION, LOWEST_VERSION, SecretAuthenticator
from allreduced.transports.base import Link, LinkOptions, Listener, Transport
from allreduced.transports.inproc import InprocLink, InprocListener
from allreduced.transports.rdma.options import RdmaOptions
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
    find: Callable[[str], Transport] = transport,
    rdma_expected: bool = False,
    rdma: RdmaOptions | None = None,
) -> Node:
    sink, timing = Sink(), derived(timeout)
    lowest, highest = versions
    options = LinkOptions(
        authenticator=SecretAuthenticator(name, incarnation, secret, lowest=lowest, highest=highest),
        connect_timeout=timing.connect,
        handshake_timeout=timing.connect,
        rdma=rdma or RdmaOptions(),
    )
    peers = Peers(name, incarnation, sink, options, find, timing=timing, rdma_expected=rdma_expected)
    node = Node(sink, peers, await peers.listen(listen.format(name)))
    if watch:
        peers.start(node.address if advertise else "")
    return node


async def end(nodes: Iterable[Node]) -> None:
    for node in nodes:
        await node.listener.close()
    for node in nodes:
        await node.peers.close(1.0)


@asynccontextmanager
async def starting() -> AsyncIterator[Start]:
    """Give a function that starts agents, which all end with the block."""
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
