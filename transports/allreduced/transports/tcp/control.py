"""The control flow of a TCP link: small frames in order, a bounded queue to send."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

from allreduced.core.errors import AgentUnavailable, ProtocolError
from allreduced.transports.base import MAX_CONTROL
from allreduced.transports.tcp import wire
from allreduced.transports.tcp.owner import FlowOwner
from allreduced.transports.tcp.stream import Stream

_READ: Final = 64 << 10
"""Bytes read per wake; bounds how long one link holds the loop."""

_PIECES: Final = 64
_SENDS_PER_WAKE: Final = 16


class ControlFlow:
    """Reads and writes control frames on one connection. Its link owns it and is told of frames and failures."""

    def __init__(self, link: FlowOwner, stream: Stream, limit: int, last: int = wire.BYE) -> None:
        self._link = link
        self._loop = link.loop
        self._stream = stream
        self._limit = limit
        self._last = last
        """The highest kind of frame that may come."""
        self._in = bytearray()
        self._piece = memoryview(bytearray(_READ))
        self._out: deque[memoryview] = deque()
        self._queued = 0
        self._scheduled = False
        self._writing = False
        self._open = True

    @property
    def flushed(self) -> bool:
        """True where everything queued was given to the kernel."""
        return not self._out and not self._stream.unsent

    def start(self) -> None:
        """Begin to read."""
        self._loop.add_reader(self._stream.fd, self._readable)
        if self._stream.buffered:
            self._loop.call_soon(self._read_on)

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
        self._loop.remove_reader(self._stream.fd)
        self._loop.remove_writer(self._stream.fd)
        self._stream.close(reset=reset)
        self._out.clear()
        self._in.clear()

    def _readable(self) -> None:
        try:
            got = self._stream.recv_into(self._piece)
        except (BlockingIOError, InterruptedError):
            self._answer()
            return
        except OSError as error:
            self._link.control_ended(str(error))
            return
        if not got:
            self._link.control_ended("the peer ended it without a goodbye")
            return
        self._link.last_received = self._loop.time()
        self._in += self._piece[:got]
        self._parse()
        if self._open and self._stream.buffered:
            self._loop.call_soon(self._read_on)  # the socket does not tell of these bytes
        self._answer()

    def _read_on(self) -> None:
        if self._open:
            self._readable()

    def _answer(self) -> None:
        """Send what receiving called for: new keys of an encrypted connection."""
        if self._open and self._stream.unsent and not self._scheduled and not self._writing:
            self._scheduled = True
            self._loop.call_soon(self._flush)

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
        try:
            while self._open and self._out and sends:
                sends -= 1
                self._consume(self._stream.send(list(islice(self._out, _PIECES))))
            if self._open:
                self._stream.flush()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._link.control_ended(str(error))
            return
        if not self._open:
            return
        if not self.flushed and not self._writing:
            self._writing = True
            self._loop.add_writer(self._stream.fd, self._flush)
        elif self.flushed and self._writing:
            self._writing = False
            self._loop.remove_writer(self._stream.fd)
        if self.flushed:
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
