"""The HTTP server: whom it answers, whom it refuses and how, and within which bounds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

import pytest

from allreduced.daemon.metrics.hosts import host_named, host_of, is_allowed
from allreduced.daemon.metrics.http import MAX_REQUEST, Answer, Handler, HttpServer, Limits, plain

BOUND = 20.0
QUICK = Limits(request_seconds=0.05, answer_seconds=0.1, linger_seconds=0.1, connections=2)
GET = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def hello() -> Answer:
    return plain(HTTPStatus.OK, "hello")


@asynccontextmanager
async def serving(limits: Limits | None = None, handler: Handler = hello) -> AsyncIterator[tuple[HttpServer, int]]:
    server = HttpServer({"/x": handler}, ["node1.example"], limits)
    _, port = await server.listen("127.0.0.1", 0)
    try:
        async with asyncio.timeout(BOUND):
            yield server, port
    finally:
        await server.close()


@asynccontextmanager
async def dialled(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect, and leave nothing open, whatever the server did."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    """Return when it is so."""
    while not condition():  # noqa: ASYNC110 # nothing tells of it
        await asyncio.sleep(0)


async def exchange(port: int, *pieces: bytes, end: bool = False) -> bytes:
    """Send the pieces, one after the other, and return all that comes back until the server ends the connection."""
    async with dialled(port) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if end:
            writer.write_eof()
        head = await reader.readuntil(b"\r\n\r\n")
        if not end:
            writer.write_eof()
        return head + await reader.read()


async def status(port: int, *pieces: bytes) -> int:
    return int((await exchange(port, *pieces)).split(b" ")[1])


async def test_an_answer_is_whole_and_says_that_the_connection_ends() -> None:
    async with serving() as (_, port):
        answer = await exchange(port, GET)
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert set(lines[1:]) == {
        b"Content-Type: text/plain; charset=utf-8",
        b"Content-Length: 6",
        b"Cache-Control: no-store",
        b"X-Content-Type-Options: nosniff",
        b"Connection: close",
    }
    assert body == b"hello\n"


async def test_requests_may_come_byte_by_byte_and_with_more_behind_them() -> None:
    async with serving() as (_, port):
        assert (await exchange(port, *(bytes([byte]) for byte in GET))).endswith(b"\r\n\r\nhello\n")
        assert (await exchange(port, GET + GET)).count(b"hello") == 1
        assert (await exchange(port, GET, end=True)).endswith(b"hello\n")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"HEAD /x HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (b"GET /x?name=a HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (b"GET /x HTTP/1.0\r\n\r\n", 200),
        (b"GET /x HTTP/1.1\r\nHost: NODE1.example.:9999\r\n\r\n", 200),
        (b"GET /x HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n", 200),
        (b"GET /x HTTP/1.1\r\nHost: [::1]\r\n\r\n", 200),
        (b"GET /y HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"DELETE /x HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"CONNECT evil.example:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET http://evil.example/x HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET /x HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n", 421),
        (b"GET /x HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n", 421),
        (b"GET /x HTTP/1.0\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET /x HTTP/1.1\r\nHost: a b\r\n\r\n", 421),
        (b"GET /x HTTP/1.1\r\nHost: [::1\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n", 413),
        (b"GET /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
        (b"GET /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET /" + b"x" * MAX_REQUEST + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"GET /x HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * 100_000 + b"\r\n\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"GET /x HTTP/9.9\r\nHost: localhost\r\n\r\n", 505),
    ],
)
async def test_each_request_gets_its_status(request_: bytes, expected: int) -> None:
    async with serving() as (server, port):
        answer = await exchange(port, request_)
        assert int(answer.split(b" ")[1]) == expected
        if request_.startswith(b"HEAD"):
            assert answer.endswith(b"\r\n\r\n")
        if expected == 405:
            assert b"\r\nAllow: GET, HEAD\r\n" in answer
        await until(lambda: not server.connections)


async def test_a_request_that_does_not_come_is_told_so_and_ended() -> None:
    async with serving(Limits(request_seconds=0.05)) as (server, port):
        assert await status(port, b"GET /x HT") == 408
        assert await status(port, b"") == 408
        await until(lambda: not server.connections)


async def test_who_does_not_read_is_cut() -> None:
    async def large() -> Answer:
        return Answer(HTTPStatus.OK, bytes(64 << 20))

    async with serving(QUICK, large) as (server, port), dialled(port) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined] # else the stream reads a little by itself
        writer.write(GET)
        await until(lambda: bool(server.connections))
        await until(lambda: not server.connections)


async def test_who_sends_for_ever_after_the_answer_is_cut() -> None:
    async with serving(Limits(linger_seconds=BOUND)) as (server, port), dialled(port) as (_, writer):
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        await until(lambda: not server.connections)


async def test_one_connection_too_many_is_told_to_come_later() -> None:
    async with serving(Limits(connections=2)) as (server, port):
        async with dialled(port), dialled(port):
            await until(lambda: len(server.connections) == 2)
            assert await status(port, b"") == 503
        await until(lambda: not server.connections and not server.turned_away)
        assert await status(port, GET) == 200


async def test_a_defect_of_a_handler_is_an_answer_too(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> Answer:
        raise ValueError("a defect")

    async with serving(handler=broken) as (_, port):
        assert await status(port, GET) == 500
    assert "event=defect" in caplog.text


async def test_a_caller_that_has_said_all_gets_the_answer_that_is_being_made() -> None:
    begun, made = asyncio.Event(), asyncio.Event()

    async def slow() -> Answer:
        begun.set()
        await made.wait()
        return await hello()

    async with serving(handler=slow) as (server, port), dialled(port) as (reader, writer):
        writer.write(GET)
        await begun.wait()
        writer.write_eof()
        (connection,) = server.connections
        await until(lambda: connection._ended)
        made.set()
        assert (await reader.read()).endswith(b"\r\n\r\nhello\n")
        await until(lambda: not server.connections)


async def test_a_caller_that_goes_away_cancels_its_answer() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def slow() -> Answer:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    async with serving(QUICK, slow) as (server, port), dialled(port) as (_, writer):
        writer.write(GET)
        await begun.wait()
        await cancelled.wait()  # the time of an answer is over
        assert not server.connections


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("localhost:1", "localhost"),
        (" A.B ", "a.b"),
        ("a.", "a"),
        ("[0:0::1]:99", "::1"),
        ("[::1]", "::1"),
        ("[::1]x", None),
        ("[zz]", None),
        ("a:b", None),
        ("a:999999", None),
        ("a:", "a"),
        (":1", None),
        ("", None),
        ("::1", None),
    ],
)
def test_hosts_of_headers(header: str, host: str | None) -> None:
    assert host_of(header) == host


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Foo.Example.", "foo.example"),
        ("10.1.2.3", "10.1.2.3"),
        ("2001:DB8::0001", "2001:db8::1"),
        ("[2001:DB8::0001]", "2001:db8::1"),
        ("node_1", "node_1"),
        ("10.1.2.3:4124", None),
        ("[::1]:80", None),
        ("*", None),
        ("http://a", None),
        ("a b", None),
        ("é.example", None),
        ("", None),
        (".", None),
    ],
)
def test_hosts_of_settings_are_written_as_those_of_headers(text: str, host: str | None) -> None:
    assert host_named(text) == host


async def test_hosts_match_however_they_are_written() -> None:
    server = HttpServer({"/x": hello}, ["Foo.Example.", "2001:DB8::0001"])
    _, port = await server.listen("127.0.0.1", 0)
    try:
        for host in (b"foo.example", b"FOO.example.:1", b"[2001:db8:0::1]:4124"):
            assert await status(port, b"GET /x HTTP/1.1\r\nHost: " + host + b"\r\n\r\n") == 200
    finally:
        await server.close()


def test_which_hosts_are_allowed() -> None:
    names = frozenset({"metrics.example"})
    assert is_allowed("127.9.9.9", "10.0.0.1", names)
    assert is_allowed("10.0.0.1", "10.0.0.1", names)
    assert is_allowed("fe80::1", "fe80::1%eth0", names)
    assert is_allowed("10.0.0.1", "::ffff:10.0.0.1", names)
    assert is_allowed("metrics.example", "10.0.0.1", names)
    assert not is_allowed("10.0.0.2", "10.0.0.1", names)
    assert not is_allowed("x.metrics.example", "10.0.0.1", names)
    assert not is_allowed("0.0.0.0", "10.0.0.1", names)
