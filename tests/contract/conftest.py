"""Links of every transport for the contract suite, and a recorder of what they tell."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from tests.support.certificates import TestAuthority
from tests.support.fake_verbs import FakeFabric, FakeVerbs

from allreduced.core.errors import AgentUnavailable, AllReducedError, ConfigError
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports.base import (
    Credentials,
    Link,
    LinkAccepted,
    LinkEvents,
    LinkOptions,
    Listener,
    Transport,
)
from allreduced.transports.inproc import InprocListener
from allreduced.transports.rdma.transport import AutoTransport, RdmaTransport
from allreduced.transports.rdma.verbs_port import Verbs
from allreduced.transports.registry import scheme_of, transport

ENDPOINTS = {
    "inproc": "inproc://contract:0",
    "tcp-ipv4": "tcp://127.0.0.1:0",
    "tcp-ipv6": "tcp://[::1]:0",
    "tcp-tls": "tls+tcp://127.0.0.1:0",
    "rdma": "rdma://127.0.0.1:0",
    "auto-without-device": "auto://127.0.0.1:0",
}
"""RDMA runs on verbs without a device, or on real ones where the variable ``REAL_ADDRESS`` is set."""

REAL_ADDRESS = "ALLREDUCED_TEST_RDMA_ADDRESS"
"""Names the environment variable with an IP address of this machine that an RDMA device has a GID for."""

BOUND = 100.0 if REAL_ADDRESS in os.environ else 20.0
"""Seconds after which a test that waits is given up: real devices are those of an emulated machine."""


def pattern(nbytes: int, seed: int) -> bytearray:
    """Return bytes whose i-th is ``(i * 7 + seed) % 251``."""
    return bytearray(((np.arange(nbytes, dtype=np.int64) * 7 + seed) % 251).astype(np.uint8).tobytes())


class Recorder(LinkEvents):
    """Writes down what a link tells; tests wait for conditions over it."""

    def __init__(self) -> None:
        self.control: list[bytes] = []
        self.pieces: list[tuple[int, int, int, int]] = []
        """(receive, offset, nbytes, tag)"""
        self.cancelled: list[int] = []
        self.sent_sends: list[int] = []
        self.ends: list[AllReducedError | None] = []
        self.order: list[str] = []
        self.on_control: Callable[[Link, bytes], None] = lambda link, payload: None
        self.on_received: Callable[[Link, int], None] = lambda link, receive: None
        self.on_cancelled: Callable[[Link, int], None] = lambda link, receive: None
        self.on_sent: Callable[[Link, int], None] = lambda link, send: None
        self._totals: dict[int, int] = {}
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def control_received(self, link: Link, payload: bytes) -> None:
        self.control.append(payload)
        self._note("control")
        self.on_control(link, payload)

    def received(self, link: Link, receive: int, offset: int, nbytes: int, tag: int) -> None:
        self.pieces.append((receive, offset, nbytes, tag))
        self._totals[receive] = self.nbytes(receive) + nbytes
        self._note("received")
        self.on_received(link, receive)

    def receive_cancelled(self, link: Link, receive: int) -> None:
        self.cancelled.append(receive)
        self._note("receive_cancelled")
        self.on_cancelled(link, receive)

    def sent(self, link: Link, send: int) -> None:
        self.sent_sends.append(send)
        self._note("sent")
        self.on_sent(link, send)

    def closed(self, link: Link, error: AllReducedError | None) -> None:
        self.ends.append(error)
        self._note("closed")

    def nbytes(self, receive: int) -> int:
        """Return how many bytes of a receive were reported."""
        return self._totals.get(receive, 0)

    def count(self) -> int:
        """Return how many callbacks came."""
        return len(self.order)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds; it is looked at after every callback."""
        if condition():
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((condition, waiting))
        async with asyncio.timeout(BOUND):
            await waiting

    async def until_control(self, frames: list[bytes]) -> None:
        """Return once exactly these control frames came."""
        await self.until(lambda: self.control == frames)

    async def until_bytes(self, receive: int, nbytes: int) -> None:
        """Return once so many bytes of a receive came."""
        await self.until(lambda: self.nbytes(receive) == nbytes)

    async def until_closed(self) -> None:
        """Return once the link is over."""
        await self.until(lambda: bool(self.ends))

    def _note(self, what: str) -> None:
        self.order.append(what)
        for condition, waiting in self._waiting:
            if not waiting.done() and condition():
                waiting.set_result(None)


@dataclass
class Pair:
    """Both ends of a link and what they told."""

    near: Link
    """The end that dialled."""
    far: Link
    near_events: Recorder
    far_events: Recorder
    listener: Listener


@dataclass
class Endpoint:
    """One transport and an address to listen at."""

    address: str
    transport: Transport
    links: list[tuple[Link, Recorder]] = field(default_factory=list)
    pins: bool = False
    """Whether memory that is posted must be there, all of it, as for a real RDMA device."""

    async def accept(self, options: LinkOptions) -> tuple[Listener, asyncio.Queue[tuple[Link, Recorder]]]:
        """Listen; accepted links come with their recorders through the queue."""
        queue: asyncio.Queue[tuple[Link, Recorder]] = asyncio.Queue()

        def accepted(link: Link) -> LinkEvents:
            recorder = Recorder()
            self.links.append((link, recorder))
            queue.put_nowait((link, recorder))
            return recorder

        return await self.transport.listen(self.address, accepted, options), queue

    @asynccontextmanager
    async def mute(self, options: LinkOptions) -> AsyncIterator[str]:
        """Yield an address where somebody listens who never answers anything."""
        if self.address.startswith("inproc://"):
            listener, _ = await self.accept(options)
            if isinstance(listener, InprocListener):
                listener.mute = True
            yield listener.address
            await listener.close()
            return
        host = self.address.partition("://")[2].removesuffix(":0").strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as sock:
            yield self.address.replace(":0", f":{sock.getsockname()[1]}")

    @asynccontextmanager
    async def pair(
        self, *, flows: int = 2, max_frame: int = 64 << 10, near: Mapping[str, int] | None = None
    ) -> AsyncIterator[Pair]:
        """Yield a fresh link between agents ``a`` (dials) and ``b``; it is gone afterwards.

        ``near``: ``flows`` and ``max_frame`` of ``a`` where they differ from those of ``b``.
        """
        options = LinkOptions(SecretAuthenticator("b", 2, b"hush"), flows=flows, max_frame=max_frame)
        listener, queue = await self.accept(options)
        near_events = Recorder()
        own = near or {}
        near_options = replace(
            options,
            authenticator=SecretAuthenticator("a", 1, b"hush"),
            flows=own.get("flows", flows),
            max_frame=own.get("max_frame", max_frame),
        )
        near_link = await self.transport.connect(listener.address, near_events, near_options)
        far, far_events = await queue.get()
        try:
            yield Pair(near_link, far, near_events, far_events, listener)
        finally:
            await listener.close()
            for link, events in ((near_link, near_events), (far, far_events)):
                link.abort(AgentUnavailable("the test is over"))
                await events.until_closed()


class Encrypted(Transport):
    """TCP with TLS, all agents of a test having one certificate with the names of all of them."""

    scheme = "tcp"

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._tcp = transport("tcp")

    async def listen(self, address: str, accepted: LinkAccepted, options: LinkOptions) -> Listener:
        return await self._tcp.listen(address, accepted, replace(options, credentials=self._credentials))

    async def connect(self, address: str, events: LinkEvents, options: LinkOptions) -> Link:
        return await self._tcp.connect(address, events, replace(options, credentials=self._credentials))


@pytest.fixture(scope="session")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    """Return credentials of the agents that the suite has."""
    authority = TestAuthority.make(tmp_path_factory.mktemp("certificates"))
    return authority.credentials("a", "b", "c", *(f"a{number}" for number in range(16)))


@pytest.fixture(params=list(ENDPOINTS.values()), ids=list(ENDPOINTS))
async def endpoint(request: pytest.FixtureRequest, credentials: Credentials) -> AsyncIterator[Endpoint]:
    """Yield one transport after the other."""
    address: str = request.param
    fabric = FakeFabric()
    made: Transport
    real = os.environ.get(REAL_ADDRESS)
    if real and address.startswith("rdma://"):
        address, made = f"rdma://{real}:0", transport("rdma")
    elif address.startswith("rdma://"):
        made = RdmaTransport(lambda: FakeVerbs(fabric))
    elif address.startswith("tls+"):
        address = address.removeprefix("tls+")
        made = Encrypted(credentials)
    elif address.startswith("auto://"):
        made = AutoTransport(_no_verbs)
    else:
        made = transport(scheme_of(address))
    yield Endpoint(address, made, pins=bool(real) and made.scheme == "rdma")
    assert fabric.leaks() == {}


def _no_verbs() -> Verbs:
    raise ConfigError("RDMA cannot be used: pyverbs is not installed")
