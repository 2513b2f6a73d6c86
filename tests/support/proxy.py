"""A network whose connections can be cut, black-holed and left half open: every agent dials the others through a proxy.

There is one wire for each pair of agents and side that dials. A thread with a loop of its own moves the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

PIECE = 256 << 10
CALL_SECONDS = 30.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def reset(connection: socket.socket) -> None:
    """Close a connection so that the other side gets a reset, with whatever was under way lost."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    connection.close()


class Connection:
    """Two sockets and what moves bytes between them. ``ends`` by node; a node whose end was cut is not in it."""

    def __init__(self, ends: dict[int, socket.socket], gates: dict[tuple[int, int], asyncio.Event]) -> None:
        self.ends = ends
        first, second = ends
        loop = asyncio.get_running_loop()
        self._pumps = [
            loop.create_task(self._pump(source, target, gates[source, target]))
            for source, target in ((first, second), (second, first))
        ]

    async def over(self) -> None:
        """Return when both sides have ended; close what is open."""
        while self._pumps:
            await asyncio.wait(self._pumps)
            self._pumps = [task for task in self._pumps if not task.done()]
        for end in self.ends.values():
            end.close()

    def cut(self) -> None:
        """Reset both sides."""
        for task in self._pumps:
            task.cancel()
        for end in self.ends.values():
            reset(end)
        self.ends.clear()

    def cut_end(self, node: int) -> None:
        """Reset the side of ``node``. The other side is left open and hears nothing any more."""
        if node not in self.ends:
            return
        for task in self._pumps:
            task.cancel()
        reset(self.ends.pop(node))
        drains = [asyncio.get_running_loop().create_task(self._drain(end)) for end in self.ends.values()]
        self._pumps = [*self._pumps, *drains]

    async def _drain(self, end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while await asyncio.get_running_loop().sock_recv(end, PIECE):
                pass

    async def _pump(self, source: int, target: int, gate: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        reader, writer = self.ends[source], self.ends[target]
        try:
            while True:
                await gate.wait()
                data = await loop.sock_recv(reader, PIECE)
                await gate.wait()
                if not data:
                    writer.shutdown(socket.SHUT_WR)
                    return
                await loop.sock_sendall(writer, data)
        except OSError:
            await gate.wait()
            self.cut()


class Wire:
    """Where ``dialler`` finds ``acceptor``. The address stays the same over restarts of the acceptor."""

    def __init__(self, dialler: int, acceptor: int, gates: dict[tuple[int, int], asyncio.Event]) -> None:
        self._nodes = (dialler, acceptor)
        self._gates = gates
        # Bound but not listening: keeps the port while the acceptor is away, and connections are refused.
        self._reserved = self._bind(0)
        self.port: int = self._reserved.getsockname()[1]
        self._listener: socket.socket | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.connections: set[Connection] = set()
        self.down = False

    def open(self, target: int) -> None:
        """Accept connections for the agent at port ``target``."""
        self.close()
        self._listener = self._bind(self.port)
        self._listener.listen(64)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener, target)

    def close(self) -> None:
        """Refuse connections, as the machine of an agent that is gone does. Those that there are stay."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def stop(self) -> None:
        """Close everything."""
        self.close()
        self._reserved.close()
        for task in list(self._serving):
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    @staticmethod
    def _bind(port: int) -> socket.socket:
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setblocking(False)
        bound.bind(("127.0.0.1", port))
        return bound

    def _accept(self, listener: socket.socket, target: int) -> None:
        # Not by ``sock_accept``, which loses a connection that comes while it is cancelled.
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            near, _ = listener.accept()
            near.setblocking(False)
            if self.down:
                reset(near)
                return
            task = asyncio.get_running_loop().create_task(self._serve(near, target))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            task.add_done_callback(lambda _: near.close())  # also where it was cancelled before it began

    async def _serve(self, near: socket.socket, target: int) -> None:
        loop = asyncio.get_running_loop()
        far = socket.socket()
        far.setblocking(False)
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await loop.sock_connect(far, ("127.0.0.1", target))
        except OSError:  # it ended a moment ago
            reset(near)
            far.close()
            return
        except asyncio.CancelledError:
            near.close()
            far.close()
            raise
        dialler, acceptor = self._nodes
        connection = Connection({dialler: near, acceptor: far}, self._gates)
        self.connections.add(connection)
        try:
            await connection.over()
        finally:
            connection.cut()
            self.connections.discard(connection)


class Proxied:
    """A network of ``nodes`` agents whose links can be made to fail. Its methods return when it has happened."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies")
        self._thread.start()
        pairs = [(one, other) for one in range(nodes) for other in range(nodes) if one != other]

        async def make() -> dict[tuple[int, int], Wire]:
            return {pair: Wire(*pair, self._gates) for pair in pairs}

        self._gates = {pair: asyncio.Event() for pair in pairs}
        for gate in self._gates.values():
            gate.set()
        self._wires = self._call(make())

    # Network

    def prefix(self, node: int) -> tuple[str, ...]:
        """See ``chaos.network``."""
        del node
        return ()

    def arguments(self, node: int) -> tuple[str, ...]:
        """See ``chaos.network``: all agents are listed, so that none is dialled at an address that it tells itself."""
        listed = [
            f"--peer={name(other)}=tcp://127.0.0.1:{self._wires[node, other].port}"
            for other in range(self._nodes)
            if other != node
        ]
        return ("--listen", "tcp://127.0.0.1:0", *listed)

    def environment(self) -> dict[str, str]:
        """See ``chaos.network``."""
        return {}

    def started(self, node: int, listen: str) -> None:
        """See ``chaos.network``."""
        port = int(listen.rpartition(":")[2])

        def act() -> None:
            for wire in self._towards(node):
                wire.open(port)

        self._on_loop(act)

    def gone(self, node: int) -> None:
        """See ``chaos.network``: its address refuses connections from now on."""

        def act() -> None:
            for wire in self._towards(node):
                wire.close()

        self._on_loop(act)

    def close(self) -> None:
        """See ``chaos.network``."""

        async def stop() -> None:
            for gate in self._gates.values():
                gate.set()
            for wire in self._wires.values():
                await wire.stop()

        self._call(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # Faults

    def cut(self, one: int, other: int) -> None:
        """Reset all connections of two nodes, and every new one, until :meth:`heal`."""

        def act() -> None:
            for wire in self._of(one, other):
                wire.down = True
                for connection in list(wire.connections):
                    connection.cut()

        self._on_loop(act)

    def half_open(self, one: int, other: int) -> None:
        """Reset the side of ``one`` of all connections of two nodes, unnoticed by ``other``. New ones work."""

        def act() -> None:
            for wire in self._of(one, other):
                for connection in list(wire.connections):
                    connection.cut_end(one)

        self._on_loop(act)

    def black_hole(self, source: int, target: int) -> None:
        """Let nothing pass from ``source`` to ``target`` until :meth:`heal`; what is sent meanwhile arrives then."""
        self._on_loop(self._gates[source, target].clear)

    def heal(self) -> None:
        """Let everything pass again."""

        def act() -> None:
            for gate in self._gates.values():
                gate.set()
            for wire in self._wires.values():
                wire.down = False

        self._on_loop(act)

    def _of(self, one: int, other: int) -> tuple[Wire, Wire]:
        return self._wires[one, other], self._wires[other, one]

    def _towards(self, node: int) -> list[Wire]:
        return [wire for pair, wire in self._wires.items() if pair[1] == node]

    def _on_loop(self, act: Callable[[], object]) -> None:
        async def run() -> None:
            act()

        self._call(run())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_SECONDS)


def name(node: int) -> str:
    """Return the name of a node."""
    return f"node{node}"
