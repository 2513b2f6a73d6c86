"""A small agent for tests of the client: real sockets, real descriptors, reductions by NumPy, in one thread."""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pytest

from allreduced.client import AsyncCommunicator, Communicator, connect
from allreduced.client.async_communicator import Connecting
from allreduced.core.dtypes import DType
from allreduced.core.errors import AllReducedError, MismatchError, to_wire
from allreduced.core.reductions import Reduction
from allreduced.protocol.framing import MessageReader
from allreduced.protocol.local import (
    CHUNK,
    MAX_MESSAGE,
    AllocateArena,
    ArenaGranted,
    Done,
    Download,
    GroupEnded,
    Hello,
    Join,
    Joined,
    Leave,
    Refused,
    ReleaseArena,
    ReleaseLeases,
    RequestFailed,
    ResultArena,
    Submit,
    ToAgent,
    ToClient,
    Upload,
    Welcome,
    decode_to_agent,
    encode,
)

SECONDS = 20.0
"""How long a test waits for what must happen; never reached where all is well."""

INLINE_LIMIT = 1024
RESULT_ARENA = 1 << 20

Array = npt.NDArray[np.generic]


def memory(nbytes: int) -> tuple[int, mmap.mmap]:
    """Return a sealed memfd and its mapping."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor, mmap.mmap(descriptor, nbytes)


@dataclass(eq=False)
class Client:
    """One connection, as the agent sees it."""

    connection: socket.socket
    reader: MessageReader = field(default_factory=lambda: MessageReader(MAX_MESSAGE))
    hello: Hello | None = None
    join: Join | None = None
    arenas: dict[int, mmap.mmap] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    uploads: dict[int, bytearray] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)

    def send(self, message: ToClient, descriptor: int = -1) -> None:
        self.send_bytes(encode(message), descriptor)

    def send_bytes(self, data: bytes, descriptor: int = -1) -> None:
        view = memoryview(data)
        # a client may close while its last message is being answered; its end is then the next thing that is read
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if descriptor >= 0:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
                view = view[self.connection.sendmsg([view], rights) :]
            self.connection.sendall(view)


@dataclass(eq=False)
class Call:
    """One operation: who submitted what."""

    name: str
    submits: dict[Client, Submit] = field(default_factory=dict)
    inputs: dict[Client, Array] = field(default_factory=dict)


Script = Callable[["FakeAgent", Client, ToAgent], bool]


class MakeAgent(Protocol):
    def __call__(self, script: Script | None = None, name: str | None = None) -> FakeAgent: ...


class FakeAgent:
    """Serves any number of clients; ``script`` sees each message first and returns True where it has dealt with it."""

    def __init__(self, *, script: Script | None = None, name: str | None = None) -> None:
        self.socket = name or f"@allreduced-test-{secrets.token_hex(8)}"
        self.script = script
        self.hold = False
        """Operations wait for :meth:`complete`."""
        self.shared = True
        self.clients: list[Client] = []
        self.seen: list[ToAgent] = []
        self.leases: set[int] = set()
        self.ended = 0
        self._calls: dict[tuple[str, int], Call] = {}
        self._held: dict[str, Call] = {}
        self.result_arenas: list[tuple[int, mmap.mmap]] = []
        self._used = RESULT_ARENA
        self._next = 100
        self._changed = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.socket[1:] if self.socket.startswith("@") else self.socket)
        self._listener.listen(16)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._orders: list[Callable[[], None]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="fake agent")
        self._thread.start()

    # For tests

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, looked at after each message."""
        with self._changed:
            assert self._changed.wait_for(condition, SECONDS), f"never happened; seen: {self.seen}"

    def count(self, kind: type[ToAgent]) -> int:
        return sum(isinstance(message, kind) for message in self.seen)

    def order(self, action: Callable[[], None]) -> None:
        """Run the action in the agent's thread."""
        self._orders.append(action)
        self._wake.send(b"x")

    def complete(self, name: str) -> None:
        """Let a held operation end, once all ranks submitted it."""
        self.until(lambda: name in self._held)
        self.order(lambda: self._finish(self._held.pop(name)))

    def fail(self, name: str, error: AllReducedError) -> None:
        """Let a held operation fail."""
        self.until(lambda: name in self._held)
        self.order(lambda: self._fail(self._held.pop(name), error))

    def end_group(self, error: AllReducedError) -> None:
        self.order(lambda: self._all(lambda client: client.send(GroupEnded(7, to_wire(error)))))

    def kill(self) -> None:
        """End all connections at once, as SIGKILL does."""
        self.order(lambda: self._all(self._drop))

    def close(self) -> None:
        if self._thread.is_alive() and not self._stopping:
            self.order(self._stop)
        self._thread.join(SECONDS)
        for closing in (self._wake, self._woken):  # not by the thread, which may stop before the byte is sent
            closing.close()

    # The thread

    def _all(self, action: Callable[[Client], None]) -> None:
        for client in list(self.clients):
            action(client)

    def _stop(self) -> None:
        self._stopping = True

    def _serve(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    client = Client(connection)
                    self.clients.append(client)
                    self._selector.register(connection, selectors.EVENT_READ, client)
                elif key.fileobj is self._woken:
                    self._woken.recv(100)
                    while self._orders:
                        self._orders.pop(0)()
                elif key.data in self.clients:
                    self._read(key.data)
        for client in list(self.clients):
            self._drop(client)
        self._calls.clear()
        self._held.clear()
        for descriptor, mapped in self.result_arenas:
            os.close(descriptor)
            mapped.close()
        for closing in (self._listener, self._selector):
            closing.close()

    def _drop(self, client: Client) -> None:
        self.clients.remove(client)
        self._selector.unregister(client.connection)
        client.connection.close()
        client.arenas.clear()
        with self._changed:
            self.ended += 1
            self._changed.notify_all()

    def _read(self, client: Client) -> None:
        try:
            data = client.connection.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            self._drop(client)
            return
        for body in client.reader.feed(data):
            message = decode_to_agent(body)
            self.seen.append(message)
            if self.script is None or not self.script(self, client, message):
                self._handle(client, message)
            with self._changed:
                self._changed.notify_all()
            if client not in self.clients:
                return

    def _handle(self, client: Client, message: ToAgent) -> None:
        if isinstance(message, Hello):
            client.hello = message
            client.send(Welcome(1, "node-a", 99, INLINE_LIMIT, 45.0))
        elif isinstance(message, Join):
            client.join = message
            waiting = [other for other in self.clients if other.join is not None and other.join.job == message.job]
            if len(waiting) == message.size:
                for other in waiting:
                    assert other.join is not None
                    ranks = tuple(range(message.size))
                    other.send(Joined(other.join.request, 7, 1, other.join.rank, message.size, 0, (("node-a", ranks),)))
        elif isinstance(message, AllocateArena):
            descriptor, mapped = memory(message.nbytes)
            self._next += 1
            client.arenas[self._next] = mapped
            client.send(ArenaGranted(message.request, self._next, message.nbytes), descriptor)
            os.close(descriptor)
        elif isinstance(message, ReleaseArena):
            client.arenas.pop(message.arena)
        elif isinstance(message, ReleaseLeases):
            self.leases -= set(message.leases)
        elif isinstance(message, Submit):
            self._submit(client, message)
        elif isinstance(message, Upload):
            data = client.uploads[message.request]
            data += message.data
            self._uploaded(client, message.request)
        else:
            assert isinstance(message, Leave)

    def _submit(self, client: Client, submit: Submit) -> None:
        assert client.join is not None
        use = client.uses[submit.name] = client.uses.get(submit.name, 0) + 1
        call = self._calls.setdefault((submit.name, use), Call(submit.name))
        call.submits[client] = submit
        nbytes = submit.count * DType(submit.dtype).itemsize
        kind = DType(submit.dtype).storage
        if submit.payload is not None:
            assert len(submit.payload) == nbytes <= INLINE_LIMIT
            call.inputs[client] = np.frombuffer(submit.payload, kind)
        elif submit.arena >= 0:
            mapped = client.arenas[submit.arena]
            call.inputs[client] = np.frombuffer(mapped, kind, submit.count, submit.offset)
        elif submit.upload:
            client.uploads[submit.request] = bytearray()
            return
        self._arrived(call, client)

    def _uploaded(self, client: Client, request: int) -> None:
        for call in self._calls.values():
            submit = call.submits.get(client)
            if submit is not None and submit.request == request:
                data = client.uploads[request]
                if len(data) == submit.count * DType(submit.dtype).itemsize:
                    call.inputs[client] = np.frombuffer(data, DType(submit.dtype).storage)
                    del client.uploads[request]
                    self._arrived(call, client)
                return

    def _arrived(self, call: Call, client: Client) -> None:
        assert client.join is not None
        if len(call.submits) < client.join.size or any(other.uploads for other in call.submits):
            return
        self._calls = {key: other for key, other in self._calls.items() if other is not call}
        if self.hold and call.name:
            with self._changed:
                self._held[call.name] = call
                self._changed.notify_all()
        else:
            self._finish(call)

    def _fail(self, call: Call, error: AllReducedError) -> None:
        for client, submit in call.submits.items():
            client.send(RequestFailed(submit.request, to_wire(error)))

    def _finish(self, call: Call) -> None:
        shapes = {client.join.rank: submit.shape for client, submit in call.submits.items() if client.join is not None}
        if len(set(shapes.values())) > 1:
            self._fail(call, MismatchError("shapes differ", field="shape", by_rank=shapes))
            return
        ranked = sorted(call.inputs, key=lambda client: client.join.rank if client.join is not None else 0)
        values = [call.inputs[client] for client in ranked]
        result = _reduce(values, Reduction(next(iter(call.submits.values())).op)) if values else None
        for client, submit in call.submits.items():
            self._deliver(client, submit, result)
        call.inputs.clear()

    def _deliver(self, client: Client, submit: Submit, result: Array | None) -> None:
        def done(payload: bytes | None = None, arena: int = -1, offset: int = 0, lease: int = 0) -> Done:
            nbytes = submit.count * DType(submit.dtype).itemsize if arena >= 0 else 0
            pieces = payload is None and arena < 0 and result is not None
            return Done(submit.request, payload, arena, offset, nbytes, lease, pieces, (), "fake", 0.25)

        if result is None or result.nbytes <= INLINE_LIMIT:
            client.send(
                done(result.tobytes() if result is not None and result.nbytes else None)
                if submit.count
                else Done(submit.request, None, -1, 0, 0, 0, False, (), "fake", 0.25)
            )
            return
        data = result.tobytes()
        if submit.inline_result:
            client.send(done())
            for start in range(0, len(data), CHUNK):
                client.send(Download(submit.request, data[start : start + CHUNK], start + CHUNK >= len(data)))
            return
        size = max(RESULT_ARENA, len(data))
        if self._used + len(data) > len(self.result_arenas[-1][1]) if self.result_arenas else True:
            self.result_arenas.append(memory(size))
            self._used = 0
        number = len(self.result_arenas) - 1
        descriptor, mapped = self.result_arenas[-1]
        if number not in client.known:
            client.known.add(number)
            client.send(ResultArena(number, 7, len(mapped)), descriptor)
        mapped[self._used : self._used + len(data)] = data
        self._next += 1
        self.leases.add(self._next)
        client.send(done(arena=number, offset=self._used, lease=self._next))
        self._used += -(-len(data) // 256) * 256


def _reduce(values: list[Array], reduction: Reduction) -> Array:
    result = values[0].copy()
    combine = {Reduction.PROD: np.multiply, Reduction.MIN: np.minimum, Reduction.MAX: np.maximum}
    for value in values[1:]:
        result = combine.get(reduction, np.add)(result, value)
    return np.divide(result, len(values)) if reduction is Reduction.MEAN else result


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    """Start an agent."""
    running = FakeAgent()
    yield running
    running.close()


@pytest.fixture
def make_agent() -> Iterator[MakeAgent]:
    """Start agents with a script of their own, or at a name of their own."""
    running: list[FakeAgent] = []

    def make(script: Script | None = None, name: str | None = None) -> FakeAgent:
        running.append(FakeAgent(script=script, name=name))
        return running[-1]

    yield make
    for each in running:
        each.close()


@pytest.fixture
def comm(agent: FakeAgent) -> Iterator[Communicator]:
    """Connect as the only rank of a group."""
    with connect(socket=agent.socket, job="test", rank=0, size=1, default_deadline=30.0) as communicator:
        yield communicator


@pytest.fixture
def aconnect(agent: FakeAgent) -> Callable[[], Connecting]:
    """Return what connects the only rank of a group with asyncio."""
    return lambda: AsyncCommunicator.connect(socket=agent.socket, job="test", rank=0, size=1, default_deadline=30.0)


def refuse(error: AllReducedError) -> Script:
    """Return a script that refuses every client."""

    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        client.send(Refused(to_wire(error)))
        return True

    return script
