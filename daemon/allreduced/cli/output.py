"""Carrying the output of many processes to one place, line by line.

A :class:`Source` cuts what one process wrote into lines. A :class:`Sink` writes lines of many sources to one descriptor
and never blocks: a stuck terminal or pager must not keep the owner from noticing signals and deaths. :class:`Streams`
joins them to a poll loop.
"""

from __future__ import annotations

import os
import select
import selectors
from collections import deque

_PIECE = select.PIPE_BUF
"""Bytes per write: what a descriptor that polls as writable takes without blocking."""

_HIGH_WATER = 1 << 20
"""Bytes that may wait in a sink before its sources are no longer read."""

LONGEST_LINE = 1 << 20
"""Bytes of a line at most; a longer one is broken here, because it must be held back until it is whole."""


class Sink:
    """An output descriptor and the lines that wait for it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closed = False
        self._waiting: deque[memoryview] = deque()
        self._size = 0
        self._line_open: object | None = None

    @property
    def pending(self) -> bool:
        """True while bytes wait to be written."""
        return self._size > 0

    @property
    def waiting(self) -> int:
        """Return how many bytes wait to be written."""
        return self._size

    @property
    def full(self) -> bool:
        """True while so much waits that the sources should be left unread."""
        return self._size >= _HIGH_WATER

    def put(self, lines: bytes, source: Source | None = None) -> None:
        """Queue whole lines, or a last line that lacks its newline. The bytes go out as they are.

        Only where another source goes on after a line without newline, that newline is added.
        """
        if self.closed or not lines:
            return
        if self._line_open is not None and self._line_open is not source:
            lines = b"\n" + lines
        self._line_open = None if lines.endswith(b"\n") else (source or self)
        self._waiting.append(memoryview(lines))
        self._size += len(lines)

    def pump(self) -> None:
        """Write some of what waits. Call it when the descriptor polls as writable.

        :raises BrokenPipeError: nobody reads any more; the sink is closed and drops all it gets from now on.
        """
        if not self._waiting:
            return
        head = self._waiting.popleft()
        try:
            written = os.write(self.fd, head[:_PIECE])
        except BlockingIOError:
            written = 0
        except OSError as error:
            self.closed = True
            self._waiting.clear()
            self._size = 0
            raise BrokenPipeError(error.errno, error.strerror) from error
        self._size -= written
        if written < len(head):
            self._waiting.appendleft(head[written:])


class Source:
    """The output of one process: bytes in, whole lines with ``prefix`` out to ``sink``."""

    def __init__(self, sink: Sink, prefix: bytes) -> None:
        self.sink = sink
        self._prefix = prefix
        self._partial = bytearray()

    def feed(self, data: bytes) -> None:
        """Take what the process wrote; whole lines go on at once."""
        self._partial += data
        end = self._partial.rfind(b"\n") + 1
        if end:
            lines = bytes(self._partial[:end])
            del self._partial[:end]
            if self._prefix:
                lines = _prefixed(self._prefix, lines)
            self.sink.put(lines, self)
        if len(self._partial) >= LONGEST_LINE:
            self.sink.put(self._prefix + bytes(self._partial) + b"\n", self)
            self._partial.clear()

    def end(self) -> None:
        """Pass on a last line without newline: the process writes no more."""
        if self._partial:
            self.sink.put(self._prefix + bytes(self._partial), self)
            self._partial.clear()


class Streams:
    """All output of a job: sources are read and sinks are written whenever ``selector`` finds them ready.

    Keys of the selector carry a function without arguments as their data.
    """

    def __init__(self, selector: selectors.BaseSelector, out: int = 1, err: int = 2) -> None:
        self._selector = selector
        self._sources: dict[int, Source] = {}
        self._paused: set[int] = set()
        self.out = Sink(out)
        self.err = self.out if os.path.sameopenfile(out, err) else Sink(err)
        self.broken = False
        """True once nobody reads one of the sinks any more."""

    def add(self, fd: int, sink: Sink, prefix: bytes) -> None:
        """Read ``fd`` from now on, and own it."""
        os.set_blocking(fd, False)
        self._sources[fd] = Source(sink, prefix)
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._read(fd))

    @property
    def pending(self) -> bool:
        """True while bytes wait to be written."""
        return self.out.pending or self.err.pending

    @property
    def waiting(self) -> int:
        """Return how many bytes wait to be written."""
        return sum(sink.waiting for sink in {self.out, self.err})

    def arm(self) -> None:
        """Tell the selector what to wait for. Call it before each select."""
        for sink in {self.out, self.err}:
            watched = sink.fd in self._selector.get_map()
            if sink.pending and not watched:
                self._selector.register(sink.fd, selectors.EVENT_WRITE, lambda sink=sink: self._write(sink))
            elif watched and not sink.pending:
                self._selector.unregister(sink.fd)
        for fd, source in self._sources.items():
            if source.sink.full and fd not in self._paused:
                self._paused.add(fd)
                self._selector.unregister(fd)
            elif not source.sink.full and fd in self._paused:
                self._paused.discard(fd)
                self._selector.register(fd, selectors.EVENT_READ, lambda fd=fd: self._read(fd))

    def drain(self) -> None:
        """Take what is left in the pipes of processes that have ended, and close them."""
        for fd in list(self._sources):
            while fd in self._sources and self._read(fd):
                pass
            self._close(fd)

    def _read(self, fd: int) -> bool:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self._sources[fd].feed(data)
        else:
            self._close(fd)
        return bool(data)

    def _write(self, sink: Sink) -> None:
        try:
            sink.pump()
        except BrokenPipeError:
            self.broken = True

    def _close(self, fd: int) -> None:
        source = self._sources.pop(fd, None)
        if source is not None:
            if fd not in self._paused:
                self._selector.unregister(fd)
            self._paused.discard(fd)
            source.end()
            os.close(fd)


def _prefixed(prefix: bytes, lines: bytes) -> bytes:
    body = lines[:-1].replace(b"\n", b"\n" + prefix)
    return prefix + body + b"\n"
