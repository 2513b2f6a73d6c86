"""The bytes of one connection, plain or encrypted: what flows and handshakes read and write instead of a socket."""

from __future__ import annotations

import abc
import asyncio
import socket
from collections.abc import Sequence

from allreduced.core.channel import Channel
from allreduced.transports.tcp.sockets import close_socket

_NOTHING = memoryview(b"")


class Stream(abc.ABC):
    """Owns one non-blocking socket. The asynchronous methods are for what comes before the flow.

    One reader and one writer at a time. Errors are OSErrors.
    """

    channel: Channel | None = None
    """What is known of the connection where it is encrypted."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._early = _NOTHING
        self.fd = sock.fileno()

    def unread(self, data: bytes) -> None:
        """Put bytes back, to be received before all others."""
        self._early = memoryview(data + self._early)

    def _take_early(self, into: memoryview) -> int:
        """Take bytes that were put back; return how many."""
        got = min(len(into), len(self._early))
        into[:got] = self._early[:got]
        self._early = self._early[got:]
        return got

    @property
    @abc.abstractmethod
    def buffered(self) -> bool:
        """True where bytes may be received though the socket is not readable."""

    @property
    @abc.abstractmethod
    def unsent(self) -> bool:
        """True where bytes that were taken wait for room in the kernel; wait for that and ``flush``."""

    @abc.abstractmethod
    def recv_into(self, into: memoryview) -> int:
        """Receive at least one byte; fewer than there is room for: there are no more now. 0: the connection ended.

        :raises BlockingIOError: nothing is there.
        :raises OSError: the connection broke; an encrypted one also where it was cut without a word.
        """

    @abc.abstractmethod
    def send(self, pieces: Sequence[memoryview]) -> int:
        """Take bytes and return how many, in order; their memory is free then.

        :raises BlockingIOError: the kernel has no room.
        :raises OSError: the connection broke.
        """

    @abc.abstractmethod
    def flush(self) -> bool:
        """Give the kernel what was taken, as far as it has room; return whether it has everything.

        :raises OSError: the connection broke.
        """

    @abc.abstractmethod
    def close(self, *, reset: bool) -> None:
        """Close the socket at once; with ``reset`` the peer is told that this is no orderly end."""

    async def receive(self, most: int) -> bytes:
        """Return up to so many bytes as soon as there are some; none at the end. Cancelling it loses nothing."""
        into = bytearray(most)
        while True:
            try:
                got = self.recv_into(memoryview(into))
            except (BlockingIOError, InterruptedError):
                await self.readable()
            else:
                return bytes(into[:got])

    async def send_all(self, data: bytes) -> None:
        """Return when the kernel has all of it."""
        rest = memoryview(data)
        while rest or not self.flush():
            try:
                rest = rest[self.send((rest,)) :]
            except (BlockingIOError, InterruptedError):
                await self.writable()
            else:
                if not rest and self.unsent:
                    await self.writable()

    def send_now(self, data: bytes) -> None:
        """Give the kernel a few last bytes if it has room, which it has on a connection that lives; fail silently."""
        try:
            self.send((memoryview(data),))
        except OSError:
            return

    async def readable(self) -> None:
        """Wait until the socket has something to read."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self.fd, _set, ready)
        try:
            await ready
        finally:
            loop.remove_reader(self.fd)

    async def writable(self) -> None:
        """Wait until the kernel has room."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_writer(self.fd, _set, ready)
        try:
            await ready
        finally:
            loop.remove_writer(self.fd)


class PlainStream(Stream):
    """A socket as it is."""

    @property
    def buffered(self) -> bool:  # noqa: D102 - see Stream
        return bool(self._early)

    @property
    def unsent(self) -> bool:  # noqa: D102
        return False

    def recv_into(self, into: memoryview) -> int:  # noqa: D102
        return self._take_early(into) if self._early else self._sock.recv_into(into)

    def send(self, pieces: Sequence[memoryview]) -> int:  # noqa: D102
        return self._sock.sendmsg(pieces)

    def flush(self) -> bool:  # noqa: D102
        return True

    def close(self, *, reset: bool) -> None:  # noqa: D102
        close_socket(self._sock, reset=reset)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
