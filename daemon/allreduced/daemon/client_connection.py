"""The socket of one client: typed messages in, typed messages and descriptors out."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
from collections import deque
from collections.abc import Generator
from math import inf
from typing import Protocol, TypeAlias

from allreduced.core.errors import AllReducedError, InternalError, ProtocolError, to_wire
from allreduced.core.refusals import Kind, Plane, kind_of, refused
from allreduced.daemon.access import Credentials, credentials_of
from allreduced.daemon.local_limits import LocalLimits
from allreduced.protocol.framing import Body, MessageReader
from allreduced.protocol.local import MAX_MESSAGE, Refused, ToAgent, ToClient, decode_to_agent, encode

logger = logging.getLogger("allreduced.local")

Pieces: TypeAlias = "Generator[ToClient, None, None]"
"""Messages that are made one by one, as fast as the client reads."""

READ_BYTES = 256 << 10
"""Bytes that are read from one connection at once."""

TURN_SECONDS = 2e-3
"""How long the messages of one connection are handled before all others have their turn."""


class ConnectionOwner(Protocol):
    """Who gets what a client sends. Called on the loop's thread."""

    def message(self, message: ToAgent) -> None:
        """Take one message, in order.

        :raises ProtocolError: it is not allowed here; the connection is refused and closed.
        """

    def closed(self, reason: str, *, orderly: bool) -> None:
        """Take note that the connection is over, once. ``orderly``: the client ended it between two messages."""


class ClientConnection:
    """One accepted connection. It never blocks; what the client does not read yet waits here, up to the limits."""

    def __init__(self, sock: socket.socket, limits: LocalLimits, scratch: bytearray) -> None:
        """Take over a connected non-blocking ``sock``. ``scratch``: memory to read into, shared by all connections."""
        self._sock = sock
        self._limits = limits
        self._scratch = memoryview(scratch)
        self._reader = MessageReader(MAX_MESSAGE)
        self._waiting: deque[Body] = deque()  # received but not handled yet
        self._out: deque[tuple[memoryview, int | None]] = deque()
        self._out_bytes = 0
        self._streams: deque[Pieces] = deque()
        self._loop = asyncio.get_running_loop()
        self._owner: ConnectionOwner
        self._writing = False
        self._paused = False
        self._handling = False
        self._behind = False
        """Messages wait that came already: they are handled in turns with other connections, and no more is read."""
        self._finishing = False
        self._reason = ""
        self._kind = Kind.HUNG_UP  # what an end in disorder is counted as
        self._unheard = False  # the client closed its end: what is sent is lost, what it sent before still counts
        self._flushed = asyncio.Event()
        self.closed = False
        self.credentials: Credentials = credentials_of(sock)
        self.pid = self.credentials.pid
        self.uid = self.credentials.uid

    def start(self, owner: ConnectionOwner) -> None:
        """Begin to read."""
        self._owner = owner
        self._loop.add_reader(self._sock.fileno(), self._readable)

    # Reading

    def pause(self) -> None:
        """Handle no further message until :meth:`resume`, also none that came already."""
        if not self._paused and not self.closed:
            self._paused = True
            self._loop.remove_reader(self._sock.fileno())

    def resume(self) -> None:
        """Go on after :meth:`pause`: at the loop's next turn, not from inside this call."""
        if self._paused and not self.closed:
            self._paused = False
            if not self._behind:
                self._loop.add_reader(self._sock.fileno(), self._readable)
            if self._waiting or self._behind:
                self._loop.call_soon(self._handle_waiting)

    def hung_up(self) -> bool:
        """Return whether the client's end is closed, also where bytes from it wait to be read."""
        if self.closed:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def read_to_end(self) -> None:
        """Handle what a client sent that hung up, then close. Only for a connection that :meth:`hung_up`."""
        if self._handling:
            return  # it is being read right now
        self._paused = False
        self._handle_waiting(turn=inf)
        while self._reading():
            self._readable(turn=inf)
        if not self.closed:
            self.close("hung up")

    def _reading(self) -> bool:
        return not (self.closed or self._paused or self._finishing)

    def _readable(self, turn: float | None = None) -> None:
        if self.closed or self._paused or self._finishing:
            return
        try:
            nbytes = self._sock.recv_into(self._scratch)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionResetError:
            nbytes = 0  # an end with messages of ours unread
        except OSError as error:
            self.close(f"broken: {error.strerror}")
            return
        if nbytes == 0:
            if self._reader.pending:
                self.close("ended in the middle of a message")
            else:
                self.close("ended by the client", orderly=True)
            return
        try:
            bodies = self._reader.feed(self._scratch[:nbytes])
        except ProtocolError as error:
            self.refuse(error)
            return
        if len(bodies) == 1 and not self._waiting:
            self._handle(bodies[0])
        elif bodies:
            self._waiting.extend(bodies)
            self._handle_waiting(turn)

    def _handle_waiting(self, turn: float | None = None) -> None:
        """Handle what came, for ``turn`` seconds at most (None: as usual); the rest at the loop's next turns."""
        waiting = self._waiting
        until = self._loop.time() + (TURN_SECONDS if turn is None else turn)
        while waiting and self._reading():
            self._handle(waiting.popleft())
            if waiting and self._loop.time() > until:
                self._fall_behind()
                return
        if self._behind and self._reading():
            self._behind = False
            self._loop.add_reader(self._sock.fileno(), self._readable)

    def _fall_behind(self) -> None:
        if not self._reading():
            return
        if not self._behind:
            self._behind = True
            self._loop.remove_reader(self._sock.fileno())
        self._loop.call_soon(self._handle_waiting)

    def _handle(self, body: Body) -> None:
        self._handling = True
        try:
            self._owner.message(decode_to_agent(body))
        except ProtocolError as error:
            self.refuse(error)
        except Exception:
            logger.exception("event=defect pid=%d uid=%d", self.pid, self.uid)
            self.refuse(InternalError("a defect in the agent ended this connection", hint="see the agent's log"))
        finally:
            self._handling = False

    # Writing

    def send(self, message: ToClient, descriptor: int | None = None) -> None:
        """Send a message now, or queue it. ``descriptor`` stays the caller's, who may close it on return.

        A client that lets more wait than the limits allow is dropped. After the end this does nothing.
        """
        self.send_encoded(encode(message), descriptor)

    def send_encoded(self, data: bytes, descriptor: int | None = None) -> None:
        """Do what :meth:`send` does, with a message that is encoded already."""
        if self.closed or self._finishing or self._unheard:
            return
        sent = 0
        if not self._out:
            try:
                if descriptor is None:
                    sent = self._sock.send(data)
                else:
                    sent = socket.send_fds(self._sock, [data], [descriptor])
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                self._lose()
                return
            if sent == len(data):
                return
        limits = self._limits
        if self._out_bytes >= limits.outgoing_bytes or len(self._out) >= limits.outgoing_messages:
            self._kind = Kind.LIMIT
            self._close_soon(f"does not read: {len(self._out)} messages of {self._out_bytes} bytes wait for it")
            return
        # A queued descriptor is a copy of its own: the number of the caller's may soon name something else.
        try:
            owned = os.dup(descriptor) if descriptor is not None and sent == 0 else None
        except OSError as error:
            self._kind = Kind.OTHER
            self._close_soon(f"cannot be given a descriptor: {error.strerror}")
            return
        self._out.append((memoryview(data)[sent:], owned))
        self._out_bytes += len(data) - sent
        self._want_write()

    def stream(self, pieces: Pieces) -> None:
        """Send messages that are made as the client reads. Other messages go in between; streams take turns.

        ``pieces`` is closed where the connection ends before it is through.
        """
        if self.closed or self._finishing or self._unheard:
            pieces.close()
            return
        self._streams.append(pieces)
        self._want_write()

    @property
    def streams(self) -> int:
        """How many :meth:`stream` are under way."""
        return len(self._streams)

    @property
    def idle(self) -> bool:
        """True when nothing waits to be sent."""
        return not self._out and not self._streams

    async def flushed(self) -> None:
        """Wait until nothing waits to be sent, or the connection is closed."""
        while not self.idle:
            self._flushed.clear()
            await self._flushed.wait()

    def _want_write(self) -> None:
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock.fileno(), self._writable)

    def _no_write(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())
        self._flushed.set()

    def _lose(self) -> None:
        """Drop what waits: the client closed its end. Reading goes on to that end, for it may have left in order."""
        self._unheard = True
        self._drop_output()
        self._no_write()

    def _drop_output(self) -> None:
        for pieces in self._streams:
            pieces.close()
        for _, owned in self._out:
            if owned is not None:
                os.close(owned)
        self._streams.clear()
        self._out.clear()

    def _writable(self) -> None:
        try:
            self._flush()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._lose()
        if self._out:
            return
        if self._finishing:
            self.close(self._reason)
        elif self._streams:
            self._next_piece()
        else:
            self._no_write()

    def _flush(self) -> None:
        while self._out:
            data, descriptor = self._out[0]
            if descriptor is None:
                sent = self._sock.send(data)
            else:
                sent = socket.send_fds(self._sock, [data], [descriptor])
                os.close(descriptor)
            self._out_bytes -= sent
            if sent < len(data):
                self._out[0] = (data[sent:], None)
                return
            self._out.popleft()

    def _next_piece(self) -> None:
        """Send one piece; the loop comes back for the next when the socket takes more."""
        pieces = self._streams.popleft()
        message = next(pieces, None)
        if message is not None:
            self._streams.append(pieces)
            self.send(message)

    # Ending

    def refuse(self, error: AllReducedError, kind: Kind | None = None) -> None:
        """Tell the client why, then close: at once if it reads, else as soon as it does or the limits say so.

        ``kind``: as what it is counted, if not by the error's type.
        """
        if self.closed or self._finishing:
            return
        self._kind = kind or kind_of(error, Kind.ACCESS)
        self.send(Refused(to_wire(error)))
        reason = f"refused: {error.message}"
        if self.idle:
            self.close(reason)
            return
        self._finishing = True
        self._reason = reason
        for pieces in self._streams:
            pieces.close()
        self._streams.clear()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.call_later(self._limits.hello_timeout, self.close, reason)

    def _close_soon(self, reason: str) -> None:
        """Close at the loop's next turn: whoever sends is in the middle of something that goes on with the client."""
        self._finishing = True
        self._reason = reason
        self._loop.call_soon(self.close, reason)

    def close(self, reason: str, *, orderly: bool = False) -> None:
        """End the connection now; ``closed`` of the owner is called from inside. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if not orderly:
            refused(Plane.CLIENTS, self._kind)
        descriptor = self._sock.fileno()
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        self._drop_output()
        self._flushed.set()
        self._waiting.clear()
        self._sock.close()
        self._owner.closed(reason, orderly=orderly)
