"""Encrypted streams: whole bytes both ways, new keys, and every way in which a connection can break."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.contract.conftest import BOUND, pattern
from tests.support.certificates import TestAuthority

from allreduced.core.errors import AllReducedError, AuthenticationError, ProtocolError
from allreduced.daemon.credentials import FileCredentials
from allreduced.transports.tcp.secure import secured_or_plain
from allreduced.transports.tcp.tls import RECORD, TlsStream, names_of


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority.make(tmp_path)


@pytest.fixture
def credentials(authority: TestAuthority) -> FileCredentials:
    return authority.credentials("a", "b")


def sockets(buffer: int = 0) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets."""
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(False)
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    return pair


@asynccontextmanager
async def connected(
    credentials: FileCredentials, buffer: int = 0
) -> AsyncIterator[tuple[TlsStream, TlsStream, socket.socket]]:
    """Yield both ends of an encrypted connection, and the socket of the first."""
    near, far = sockets(buffer)
    dialler = TlsStream(near, credentials.context(listening=False), listening=False)
    listener = TlsStream(far, credentials.context(listening=True), listening=True)
    async with asyncio.timeout(BOUND):
        await asyncio.gather(dialler.handshake(), listener.handshake())
    try:
        yield dialler, listener, near
    finally:
        for sock in (near, far):
            sock.close()


async def read(stream: TlsStream, nbytes: int) -> bytearray:
    """Read exactly so many bytes."""
    data = bytearray(nbytes)
    got = 0
    async with asyncio.timeout(BOUND):
        while got < nbytes:
            try:
                came = stream.recv_into(memoryview(data)[got:])
            except BlockingIOError:
                if stream.unsent:
                    stream.flush()
                await stream.readable()
            else:
                assert came
                got += came
    return data


async def test_both_ends_know_one_binding_and_each_others_names(credentials: FileCredentials) -> None:
    bindings = set()
    for _ in range(2):
        async with connected(credentials) as (near, far, _):
            assert near.channel is not None
            assert near.channel == far.channel
            assert near.channel.names == {"a", "b"}
            assert len(near.channel.binding) >= 32
            bindings.add(near.channel.binding)
    assert len(bindings) == 2


async def test_both_ends_may_send_much_at_once_through_small_buffers(credentials: FileCredentials) -> None:
    size = (2 << 20) + 12_345
    async with connected(credentials, 8192) as (near, far, _):
        sent = await asyncio.gather(
            near.send_all(bytes(pattern(size, 1))),
            far.send_all(bytes(pattern(size, 2))),
            read(near, size),
            read(far, size),
        )
        assert sent[2] == pattern(size, 2)
        assert sent[3] == pattern(size, 1)
        assert not near.unsent
        assert not far.unsent


async def test_pieces_of_any_size_come_in_order(credentials: FileCredentials) -> None:
    sizes = [1, 32, RECORD, 5, RECORD - 1, RECORD + 1, 3, 70_000, 0, 2]
    pieces = [memoryview(pattern(size, size)) for size in sizes]
    async with connected(credentials) as (near, far, _):
        total = sum(sizes)
        assert near.send(pieces) == total
        assert await read(far, total) == b"".join(pieces)
        with pytest.raises(BlockingIOError):
            far.recv_into(memoryview(bytearray(1)))


async def test_what_is_small_shares_a_record(credentials: FileCredentials) -> None:
    async with connected(credentials) as (near, far, _):
        near.send([memoryview(bytes(100))] * 50)
        raw = far._sock.recv(1 << 20)
        assert 5000 < len(raw) < 5100


async def test_a_reader_that_does_not_read_stops_the_sender_and_bounds_what_waits(
    credentials: FileCredentials,
) -> None:
    async with connected(credentials, 8192) as (near, far, _):
        data = memoryview(bytes(pattern(4 << 20, 9)))
        taken = near.send([data])
        assert 0 < taken < 1 << 20
        assert near.unsent
        assert not near.flush()
        with pytest.raises(BlockingIOError):
            near.send([data[taken:]])
        rest, received = asyncio.ensure_future(near.send_all(bytes(data[taken:]))), await read(far, 4 << 20)
        await rest
        assert received == data


async def test_the_end_in_order_and_the_cut(credentials: FileCredentials) -> None:
    into = memoryview(bytearray(100))
    async with connected(credentials) as (near, far, _):
        near.send([memoryview(b"last")])
        near.close(reset=False)
        assert far.recv_into(into) == 4
        assert far.recv_into(into) == 0
        assert far.recv_into(into) == 0
    async with connected(credentials) as (near, far, sock):
        near.send([memoryview(b"last")])
        sock.shutdown(socket.SHUT_WR)
        assert far.recv_into(into) == 4
        for _ in range(2):
            with pytest.raises(ConnectionResetError, match="without the goodbye of TLS"):
                far.recv_into(into)


async def test_a_record_that_is_cut_in_the_middle(credentials: FileCredentials) -> None:
    async with connected(credentials) as (near, far, sock):
        near._tls.write(bytes(1000))
        sock.send(near._outgoing.read()[:500])
        into = memoryview(bytearray(100))
        with pytest.raises(BlockingIOError):
            far.recv_into(into)
        sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError, match="without the goodbye"):
            far.recv_into(into)


@pytest.mark.parametrize("at", [0, 3, 10, 300, 900])
async def test_a_byte_that_was_changed_breaks_the_connection(credentials: FileCredentials, at: int) -> None:
    async with connected(credentials) as (near, far, sock):
        near._tls.write(bytes(1000))
        record = bytearray(near._outgoing.read())
        record[at] ^= 0x40
        sock.send(record)
        into = bytearray(2000)
        with pytest.raises(OSError, match="SSL"):
            far.recv_into(memoryview(into))
        assert into == bytes(2000)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
async def test_new_keys_are_answered_while_data_flows(authority: TestAuthority) -> None:
    """``openssl s_client`` asks for new keys at a line ``K``."""
    credentials, files = authority.credentials("a"), authority.issue("b")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        process = await asyncio.create_subprocess_exec(
            *("openssl", "s_client", "-connect", f"127.0.0.1:{server.getsockname()[1]}", "-no_ign_eof"),
            *("-CAfile", files.ca, "-cert", files.certificate, "-key", files.key),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        sock, _ = await asyncio.get_running_loop().sock_accept(server)
        sock.setblocking(False)
        stream = await secured_or_plain(sock, credentials)
        assert isinstance(stream, TlsStream)
        for line in (b"before\n", b"K\n", b"between\n", b"K\n", b"after\n"):
            process.stdin.write(line)
            await process.stdin.drain()
            said = b"KEYUPDATE\n"
            if line != b"K\n":
                assert bytes(await read(stream, len(line))) == line
                said = line.upper()
                await stream.send_all(said)
            async with asyncio.timeout(BOUND):
                while await process.stdout.readline() != said:
                    pass  # what it says about the connection
        stream.close(reset=False)
        process.stdin.close()
        await process.wait()


async def _answer(first: bytes, credentials: FileCredentials) -> tuple[Exception, bytes]:
    """Let somebody who begins with these bytes meet a listener; return how that ends and what it says."""
    near, far = sockets()
    near.send(first)
    near.shutdown(socket.SHUT_WR)
    try:
        with pytest.raises((AllReducedError, ConnectionError)) as caught:
            async with asyncio.timeout(BOUND):
                await secured_or_plain(far, credentials)
        try:
            return caught.value, near.recv(1000)
        except BlockingIOError:
            return caught.value, b""
    finally:
        near.close()
        far.close()


async def test_what_is_no_tls_1_3(credentials: FileCredentials) -> None:
    error, said = await _answer(b"", credentials)
    assert isinstance(error, ConnectionError)
    error, said = await _answer(b"\x16\x03\x01\x00\x05hello", credentials)
    assert isinstance(error, ProtocolError)
    assert said[:1] == b"\x15"  # an alert
    error, _ = await _answer(b"\x16\x03\x01\x40\x00" + bytes(100), credentials)
    assert isinstance(error, ConnectionError)
    near, far = sockets()
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        old.wrap_bio(incoming, outgoing).do_handshake()
    near.close()
    far.close()
    error, said = await _answer(outgoing.read(), credentials)
    assert isinstance(error, AuthenticationError)
    assert "does not speak TLS 1.3" in str(error)


async def test_a_client_without_a_certificate_is_refused(credentials: FileCredentials) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    near, far = sockets()
    dialler = TlsStream(near, bare, listening=False)
    listener = TlsStream(far, credentials.context(listening=True), listening=True)
    results = await asyncio.gather(dialler.handshake(), listener.handshake(), return_exceptions=True)
    assert results[0] is None  # with TLS 1.3 the dialler learns it later
    assert isinstance(results[1], AuthenticationError)
    assert "no certificate" in str(results[1])
    with pytest.raises(AuthenticationError, match="there is none"):
        await dialler.receive(10)
    near.close()
    far.close()


def test_names_are_dns_names_only() -> None:
    names = (("DNS", "a"), ("IP Address", "10.0.0.1"), ("URI", "b"), ("DNS", "*.c"))
    assert names_of({"subjectAltName": names}) == {"a", "*.c"}
    assert names_of({}) == frozenset()
