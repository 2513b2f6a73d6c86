"""The control flow of a TCP link: small frames in order, a bounded queue to send."""

from __future__ import annotations

import socket
from collections import deque
from itertools import islice
from typing import Final

from allreduced.core.errors import AgentUnavailable, ProtocolError
from allreduced.transports.base import MAX_CONTROL
from allreduced.transports.tcp import wire
from allreduced.transports.tcp.owner import FlowOwner
from allreduced.transports.tcp.sockets import close_socket

_READ: Final = 64 << 10
"""Bytes read per wake; bounds how long one link holds the loop."""

_PIECES: Final = 64
_SENDS_PER_WAKE: Final = 16


class ControlFlow:
    """Reads and writes control frames on one socket. Its link owns it and is told of frames and failures."""

    def __init__(self, link: FlowOwner, sock: socket.socket, early: bytes, limit: int, last: int = wire.BYE) -> None:
        self._link = link
        self._loop = link.loop
        self._sock = sock
        self._fd = sock.fileno()
        self._limit = limit
        self._last = last
        """The highest kind of frame that may come."""
        self._in = bytearray(early)
        self._out: deque[memoryview] = deque()
        self._queued = 0
        self._scheduled = False
        self._writing = False
        self._open = True

    @property
    def flushed(self) -> bool:
        """True where everything queued was given to the kernel."""
        return not self._out

    def start(self) -> None:
        """Begin to read."""
        self._loop.add_reader(self._fd, self._readable)
        if self._in:
            self._loop.call_soon(self._parse)

    def queue(self, kind: int, payload: bytes) -> None:
        """Queue one frame; a queue that is too long ends the link."""
        self._out.append(memoryview(wire.control_header(kind, len(payload)) + payload))
        self._queued += wire.CONTROL_HEADER + len(payload)
        if self._queued > self._limit:
            self._link.end(
                AgentUnavailable(
                    f"node {self._link.peer.node!r} at {self._link.remote_address} does not read its control frames:"
                    f" {self._queued} bytes are queued, {self._limit} are allowed"
                )
            )
        elif not self._scheduled and not self._writing:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def stop(self, *, reset: bool) -> None:
        """Close the socket at once."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        close_socket(self._sock, reset=reset)
        self._out.clear()
        self._in.clear()

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._link.control_ended(str(error))
            return
        if not data:
            self._link.control_ended("the peer ended it without a goodbye")
            return
        self._link.last_received = self._loop.time()
        self._in += data
        self._parse()

    def _parse(self) -> None:
        """Hand over every whole frame of the buffer."""
        buffer = self._in
        at = 0
        while self._open and len(buffer) - at >= wire.CONTROL_HEADER:
            try:
                kind, length = wire.read_control_header(buffer, at, MAX_CONTROL, self._last)
            except ProtocolError as error:
                self._link.violated(error)
                return
            end = at + wire.CONTROL_HEADER + length
            if len(buffer) < end:
                break
            payload = bytes(memoryview(buffer)[at + wire.CONTROL_HEADER : end])
            at = end
            self._link.control_frame(kind, payload)
        if self._open:
            del buffer[:at]

    def _flush(self) -> None:
        self._scheduled = False
        sends = _SENDS_PER_WAKE
        while self._open and self._out and sends:
            sends -= 1
            try:
                sent = self._sock.sendmsg(list(islice(self._out, _PIECES)))
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._link.control_ended(str(error))
                return
            self._consume(sent)
        if not self._open:
            return
        if self._out and not self._writing:
            self._writing = True
            self._loop.add_writer(self._fd, self._flush)
        elif not self._out and self._writing:
            self._writing = False
            self._loop.remove_writer(self._fd)
        if not self._out:
            self._link.control_flushed()

    def _consume(self, sent: int) -> None:
        self._queued -= sent
        out = self._out
        while sent:
            first = out[0]
            if sent < len(first):
                out[0] = first[sent:]
                return
            sent -= len(first)
            out.popleft()
