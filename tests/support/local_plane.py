"""A raw client of the local plane and a stand-in for the driver, for tests of the agent's side."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from allreduced.core.errors import AllReducedError
from allreduced.core.identity import Member
from allreduced.daemon.access import Access
from allreduced.daemon.arena_table import ArenaLimits, ArenaTable
from allreduced.daemon.engine.events import Event, GroupStarted, Submitted
from allreduced.daemon.local_limits import LocalLimits
from allreduced.daemon.local_server import LocalServer
from allreduced.daemon.membership.events import ClientGone, ClientJoining
from allreduced.daemon.membership.events import Event as MembershipEvent
from allreduced.daemon.ports import Result
from allreduced.protocol.framing import MessageReader
from allreduced.protocol.local import (
    MAX_MESSAGE,
    Hello,
    Join,
    Joined,
    Submit,
    ToAgent,
    ToClient,
    Welcome,
    decode_to_client,
    encode,
)

T = TypeVar("T")
GROUP = 77
NOBODY = Access(1 << 31, observers=frozenset())
"""Lets no user of this machine attach."""
NODE = "n0"
INCARNATION = 5
PATIENCE = 10.0


def submit(request: int, **changes: object) -> Submit:
    """Return a submit of four float32 to sum, without an input."""
    fields: dict[str, object] = {
        "group": GROUP, "kind": "all_reduce", "name": "", "dtype": 1, "op": 1, "shape": "(4,)", "count": 4, "root": -1,
        "priority": 0, "deadline": 0.0, "algorithm": "", "payload": None, "arena": -1, "offset": 0, "upload": False,
        "inline_result": False,
    }  # fmt: skip
    return Submit(request, **(fields | changes))  # type: ignore[arg-type] # tests send what is not allowed, too


@dataclass
class FakeSink:
    """Remembers what the local plane tells the driver. ``answer`` is called with each event of the engine's.

    ``refused``: submits whose part the agent cannot take; they are answered as the engine does it, by ``refuse``.
    """

    engine: list[Event] = field(default_factory=list)
    refused: list[Submitted] = field(default_factory=list)
    refuse: Callable[[int, int, AllReducedError], None] = lambda client, request, error: None
    membership: list[MembershipEvent] = field(default_factory=list)
    answer: Callable[[Event], None] = lambda event: None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def engine_event(self, event: Event) -> None:
        if isinstance(event, Submitted) and event.refused is not None:
            self.refused.append(event)
            self.refuse(event.client, event.request, event.refused)
            return
        self.engine.append(event)
        self.answer(event)
        self._changed.set()

    def membership_event(self, event: MembershipEvent) -> None:
        self.membership.append(event)
        self._changed.set()

    @property
    def gone(self) -> list[int]:
        """The clients whose end was told to the memberships."""
        return [event.client for event in self.membership if isinstance(event, ClientGone)]

    def now(self) -> float:
        return time.monotonic()

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until what was told so far satisfies ``done``."""
        async with asyncio.timeout(PATIENCE):
            while not done():
                self._changed.clear()
                await self._changed.wait()

    async def told(self, kind: type[T], number: int = 1) -> T:
        """Wait for the ``number``-th event of ``kind`` and return it."""

        def found() -> list[T]:
            return [event for event in (*self.engine, *self.membership) if isinstance(event, kind)]

        await self.until(lambda: len(found()) >= number)
        return found()[number - 1]


class RawClient:
    """One connection, message by message. Received descriptors collect in ``descriptors``."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.descriptors: list[int] = []
        self._reader = MessageReader(MAX_MESSAGE)
        self._messages: list[ToClient] = []
        self._ended = False
        self.at_once = 1 << 16
        """Bytes that one read takes at most."""

    @classmethod
    def connect(cls, address: str) -> RawClient:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(address)  # completes as soon as the listener's backlog takes it
        sock.setblocking(False)
        return cls(sock)

    async def send(self, *messages: ToAgent) -> None:
        await self.send_bytes(b"".join(encode(message) for message in messages))

    async def send_bytes(self, data: bytes) -> None:
        async with asyncio.timeout(PATIENCE):
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def receive(self, kind: type[T]) -> T:
        """Return the next message, which must be of this kind."""
        async with asyncio.timeout(PATIENCE):
            while not self._messages and not self._ended:
                await self._read()
        assert self._messages, "the connection ended"
        message = self._messages.pop(0)
        assert isinstance(message, kind), message
        return message

    async def rest(self) -> list[ToClient]:
        """Read to the end of the connection and return all that came."""
        async with asyncio.timeout(PATIENCE):
            while not self._ended:
                await self._read()
        messages, self._messages = self._messages, []
        return messages

    async def _read(self) -> None:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.sock.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self.sock.fileno())
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, self.at_once, 4, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            data, descriptors = b"", []
        self.descriptors += descriptors
        self._ended = not data
        self._messages += [decode_to_client(body) for body in self._reader.feed(data)]

    async def hello(self, *, shared_memory: bool = True) -> Welcome:
        await self.send(Hello(1, 1, os.getpid(), shared_memory))
        return await self.receive(Welcome)

    def close(self) -> None:
        self.sock.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


@dataclass
class Plane:
    """A local server with a fake driver behind it."""

    server: LocalServer
    sink: FakeSink
    arenas: ArenaTable
    name: str
    clients: list[RawClient] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.name.replace("@", "\0", 1)

    def connect(self) -> RawClient:
        client = RawClient.connect(self.address)
        self.clients.append(client)
        return client

    async def until_clients(self, count: int) -> None:
        """Wait until the server has accepted, or lost, as many connections as to have ``count``."""
        async with asyncio.timeout(PATIENCE):
            while self.server.clients != count:  # noqa: ASYNC110 - it tells nobody of strangers
                await asyncio.sleep(0)

    async def attach(self, *, shared_memory: bool = True) -> RawClient:
        client = self.connect()
        await client.hello(shared_memory=shared_memory)
        return client

    async def join(
        self, rank: int = 0, *, shared_memory: bool = True, default_deadline: float = 60.0
    ) -> tuple[RawClient, int]:
        """Return an attached client that holds ``rank`` of a group of two, and its number at the agent."""
        client = await self.attach(shared_memory=shared_memory)
        before = sum(isinstance(event, ClientJoining) for event in self.sink.membership)
        await client.send(Join(1, "job", "world", rank, 2, rank, 30.0, default_deadline))
        joining = await self.sink.told(ClientJoining, before + 1)
        members = (Member(NODE, INCARNATION, (0, 1)),)
        started = GroupStarted(GROUP, joining.key, 1, 1 << 20, members, 0, {rank: joining.client})
        self.server.admitted(joining.client, 1, rank, started)
        await client.receive(Joined)
        return client, joining.client

    def deliver(self, client: int, request: int, data: bytes | None, *, arena: int = -1, lease: int = 0) -> None:
        """End an operation with ``data``, or with what is in a result arena if ``arena`` is given."""
        nbytes = len(data) if data is not None else 0
        if arena >= 0:
            nbytes = self.arenas.nbytes(arena)
        view = memoryview(data) if data is not None else None
        self.server.delivered(client, request, Result(view, arena, 0, nbytes, lease, (), "direct", 0.25))

    def input(self, event: Submitted) -> bytes:
        """Return a copy of the input of an operation."""
        assert event.source is not None
        with self.arenas.view(event.source) as view:
            return bytes(view)

    async def result_arena(self, buffer: int, nbytes: int) -> None:
        """Make a result arena of the group, filled with a pattern."""
        made = asyncio.Event()
        self.arenas.create(buffer, GROUP, nbytes, lambda number, error: made.set())
        await asyncio.wait_for(made.wait(), PATIENCE)


@asynccontextmanager
async def open_plane(
    *,
    limits: LocalLimits | None = None,
    arenas: ArenaLimits | None = None,
    access: Access | None = None,
    job_secrets: bool = False,
    name: str = "",
) -> AsyncIterator[Plane]:
    """Serve clients on an abstract socket of a fresh name, or on ``name``."""
    table = ArenaTable(arenas or ArenaLimits.from_total(64 << 20))
    sink = FakeSink()
    server = LocalServer(
        sink,
        table,
        node=NODE,
        incarnation=INCARNATION,
        limits=limits or LocalLimits(),
        access=access,
        job_secrets=job_secrets,
    )
    sink.refuse = server.failed
    name = name or f"@allreduced-test-{secrets.token_hex(8)}"
    server.listen(name)
    plane = Plane(server, sink, table, name)
    try:
        yield plane
    finally:
        await server.close()
        for client in plane.clients:
            client.close()
        server.release_memory()
        await table.close()
