"""TLS 1.3 under the handshake and the flows: a stream whose bytes are encrypted between the flow and the socket.

Encryption happens in memory, apart from the socket: what comes is read in pieces of many records, what goes is sent in
pieces of many records, and that reading may need writing (new keys, an alert) never blocks the reader.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from allreduced.core.channel import Channel
from allreduced.transports.tcp.sockets import close_socket
from allreduced.transports.tcp.stream import Stream
from allreduced.transports.tcp.tls_refusals import refusal

RECORD: Final = 16 << 10
"""Bytes that one record of TLS holds."""

_PIECE: Final = 256 << 10
"""Bytes of encrypted records that are read, and sent, at once by a flow that moves much."""

_SMALL: Final = 16 << 10
"""The same where little is read: by handshakes, of which strangers may begin many, and control flows."""

_FIRST: Final = 0x16
"""The first byte of every connection of TLS: a record of its handshake."""

_CUT: Final = "the connection was cut: it ended without the goodbye of TLS"

_NOTHING: Final = memoryview(b"")


def is_tls(data: bytes) -> bool:
    """Tell whether a connection that begins with these bytes speaks TLS."""
    return data[:1] == bytes([_FIRST])


class TlsStream(Stream):
    """An encrypted connection. ``channel`` is known once :meth:`handshake` has returned."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, listening: bool) -> None:
        super().__init__(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=listening)
        self._piece = memoryview(bytearray(_SMALL))
        self._rest = _NOTHING
        """Encrypted bytes that the kernel had no room for."""
        self._agreed = False

    async def handshake(self, first: bytes = b"") -> None:
        """Agree on keys and see the other side's certificate. ``first``: bytes that were received already.

        With TLS 1.3 the dialler may be through before the listener has looked at its certificate; then the refusal
        comes with what is received next.

        :raises CertificateError: one side does not accept the other's certificate; both are told.
        :raises ProtocolError: the other side does not speak TLS 1.3.
        :raises ConnectionError: the connection ended.
        """
        self._incoming.write(first)
        while True:
            try:
                self._tls.do_handshake()
                self._agreed = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                self._say_last()  # the alert
                raise refusal(error) from error
            while not self.flush():
                await self.writable()
            if self._agreed:
                break
            while self._pull() is None:
                await self.readable()
        self.channel = Channel(self._binding(), names_of(self.certificate()))

    def certificate(self) -> Mapping[str, object]:
        """Return the other side's certificate as ``ssl.SSLSocket.getpeercert`` does."""
        return self._tls.getpeercert() or {}

    def _binding(self) -> bytes:
        """Return the dialler's Finished message of the handshake: a code over all of it, under keys of this connection.

        Both ends have it, and it covers both certificates; sessions are never resumed.
        """
        return self._tls.get_channel_binding("tls-unique") or b""

    @property
    def buffered(self) -> bool:  # noqa: D102 - see Stream
        return bool(self._early or self._incoming.pending or self._tls.pending())

    @property
    def unsent(self) -> bool:  # noqa: D102
        return bool(self._rest or self._outgoing.pending)

    def recv_into(self, into: memoryview) -> int:  # noqa: D102
        if self._early:
            return self._take_early(into)
        read: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment] # so it is with a buffer
        got, room = 0, len(into)
        if room >= _PIECE > len(self._piece):
            self._piece = memoryview(bytearray(_PIECE))
        drained = False
        try:
            while got < room:
                try:
                    piece = read(room - got, into[got:])
                    if not piece:
                        return got  # the goodbye of TLS
                    got += piece
                except ssl.SSLWantReadError:
                    if drained or self._incoming.eof:
                        break
                    came = self._pull()
                    if came is None:
                        break
                    drained = 0 < came < len(self._piece)  # the socket will tell when there is more
        except ssl.SSLZeroReturnError:
            return got
        except ssl.SSLEOFError as error:
            if not got:
                raise ConnectionResetError(_CUT) from error
        if self._outgoing.pending:
            self.flush()  # new keys are answered
        if got:
            return got
        if self._incoming.eof:
            raise ConnectionResetError(_CUT)
        raise BlockingIOError

    def send(self, pieces: Sequence[memoryview]) -> int:  # noqa: D102
        if self.unsent and not self.flush():
            raise BlockingIOError
        taken, outgoing, write = 0, self._outgoing, self._tls.write
        for piece in _records(pieces):
            at, end = 0, len(piece)
            while at < end:
                if outgoing.pending >= _PIECE and not self.flush():
                    return taken + at
                at += write(piece[at : at + _PIECE])
            taken += end
        self.flush()
        return taken

    def flush(self) -> bool:  # noqa: D102
        while True:
            if not self._rest:
                if not self._outgoing.pending:
                    return True
                self._rest = memoryview(self._outgoing.read())
            try:
                self._rest = self._rest[self._sock.send(self._rest) :]
            except (BlockingIOError, InterruptedError):
                return False

    def close(self, *, reset: bool) -> None:  # noqa: D102
        if not reset and self._agreed:
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()  # the goodbye of TLS; nobody waits for the other side's
            self._say_last()
        close_socket(self._sock, reset=reset)

    async def receive(self, most: int) -> bytes:  # noqa: D102
        try:
            return await super().receive(most)
        except ssl.SSLError as error:
            self._say_last()
            raise refusal(error) from error

    async def send_all(self, data: bytes) -> None:  # noqa: D102
        try:
            await super().send_all(data)
        except ConnectionError:
            await self.receive(1)  # the other side may have said why
            raise

    def _pull(self) -> int | None:
        """Take what came and return how many bytes that was, 0 at the end; None if there is nothing."""
        try:
            came = self._sock.recv_into(self._piece)
        except (BlockingIOError, InterruptedError):
            return None
        if came:
            self._incoming.write(self._piece[:came])
        else:
            self._incoming.write_eof()
        return came

    def _say_last(self) -> None:
        try:
            self.flush()
        except OSError:
            return


def _records(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    """Join what is small, so that it costs one record and not one each."""
    small = bytearray()
    for piece in pieces:
        if len(small) + len(piece) <= RECORD:
            small += piece
            continue
        if small:
            yield memoryview(small)
            small = bytearray()
        yield piece
    if small:
        yield memoryview(small)


def names_of(certificate: Mapping[str, object]) -> frozenset[str]:
    """Return the names of nodes in a certificate as ``getpeercert`` gives it: its DNS names. There are no wildcards."""
    names = certificate.get("subjectAltName", ())
    return frozenset(value for kind, value in names if kind == "DNS") if isinstance(names, tuple) else frozenset()
