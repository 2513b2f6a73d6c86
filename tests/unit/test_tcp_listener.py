"""The listening port against strangers, the slow, the many, and addresses that cannot be."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from tests.contract.conftest import Recorder
from tests.unit.raw_peer import SECRET, listening, open_flow, open_socket, read_to_end, turns_until, write

from allreduced.core.errors import AgentUnavailable, AuthenticationError, ConfigError, ProtocolError
from allreduced.core.refusals import Kind
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports.base import LinkOptions
from allreduced.transports.tcp import TcpTransport
from allreduced.transports.tcp.address import parse, text
from allreduced.transports.tcp.sockets import prepare
from allreduced.transports.tcp.stream import Stream


def _options(**more: float) -> LinkOptions:
    return LinkOptions(SecretAuthenticator("a", 1, SECRET), handshake_timeout=more.get("handshake_timeout", 20.0))


def _drops(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "connection_dropped" in record.message]


@pytest.mark.parametrize(
    "stray",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(range(256)) * 40,
        b"\xa7allred\n\x01\xff\xff" + bytes(70_000),
        b"\xa7allred\n\x02\x20\x00" + bytes(32),
    ],
    ids=["http", "noise", "oversized", "wrong-type"],
)
async def test_strangers_are_dropped_without_an_answer(stray: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as (listener, queue):
        events = Recorder()
        link = await TcpTransport().connect(listener.address, events, _options())
        far, far_events = await queue.get()
        sock = await open_socket(listener.address)
        try:
            await write(sock, stray[:500])
            assert await read_to_end(sock) == b""
        finally:
            sock.close()
        assert len(_drops(caplog)) == 1
        link.send_control(b"not disturbed")
        await far_events.until_control([b"not disturbed"])
        assert far.peer.node == "a"
        await link.close(20)
        assert events.ends == [None]
        assert queue.empty()


async def test_who_is_refused_again_and_again_is_told_of_once_and_costs_each_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[float] = []
    monkeypatch.setattr("allreduced.transports.tcp.listener.AcceptBudget.take", lambda self, now: taken.append(now))
    monkeypatch.setattr("allreduced.transports.tcp.listener.AcceptBudget.give_back", lambda self: taken.pop())
    stranger = LinkOptions(SecretAuthenticator("a", 1, b"another"), handshake_timeout=20.0)

    async def until_taken(times: int) -> None:
        await turns_until(lambda: len(taken) == times)

    async with listening() as (listener, _):
        for times in range(1, 4):
            with pytest.raises(AuthenticationError):
                await TcpTransport().connect(listener.address, Recorder(), stranger)
            await until_taken(times)
    assert len(_drops(caplog)) == 1


async def test_hosts_and_reasons_that_are_remembered_are_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allreduced.transports.tcp.listener.MAX_REFUSED", 2)
    monkeypatch.setattr("allreduced.transports.tcp.listener.AcceptBudget.wait", lambda self, now: 0.0)
    counted: list[Kind] = []
    monkeypatch.setattr("allreduced.transports.tcp.listener.refused", lambda plane, kind: counted.append(kind))

    async def another_reason(sock: socket.socket, credentials: object) -> Stream:
        raise AuthenticationError(f"reason {len(counted)}")

    monkeypatch.setattr("allreduced.transports.tcp.listener.secured_or_plain", another_reason)
    async with listening() as (listener, queue):
        for _ in range(5):
            sock = await open_socket(listener.address)
            assert await read_to_end(sock) == b""
            sock.close()
        assert queue.empty()
    assert len(counted) == 5  # each of them, whether or not it is said
    assert [line.partition("reason=")[2] for line in _drops(caplog)] == ["'reason 0'", "'reason 1'"]


async def test_a_connection_that_ends_in_its_handshake_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="allreduced.transports.tcp")
    async with listening() as (listener, queue):
        sock = await open_socket(listener.address)
        await write(sock, SecretAuthenticator("a", 1, SECRET).dial(b"", 0, 1).start()[:30])
        sock.close()
        await turns_until(lambda: len(_drops(caplog)) == 1)
        assert [record.levelno for record in caplog.records] == [logging.INFO]  # agents that stop do that
        assert queue.empty()


async def test_a_silent_connection_is_dropped_in_time(caplog: pytest.LogCaptureFixture) -> None:
    async with listening(handshake_timeout=0.05) as (listener, queue):
        sock = await open_socket(listener.address)
        assert await read_to_end(sock) == b""
        sock.close()
        assert len(_drops(caplog)) == 1
        assert "in time" in _drops(caplog)[0]
        assert queue.empty()


async def test_the_oldest_unfinished_handshakes_make_room(caplog: pytest.LogCaptureFixture) -> None:
    async with listening(max_pending_handshakes=3) as (listener, queue):
        silent = [await open_socket(listener.address) for _ in range(5)]
        try:
            for sock in silent[:2]:
                assert await read_to_end(sock) == b""
            assert len(_drops(caplog)) == 2
            events = Recorder()
            link = await TcpTransport().connect(listener.address, events, _options())
            await queue.get()
            await link.close(20)
            assert await read_to_end(silent[2]) == b""
            assert "too many unfinished handshakes" in _drops(caplog)[-1]
        finally:
            for sock in silent:
                sock.close()


async def test_data_flows_that_never_come(caplog: pytest.LogCaptureFixture) -> None:
    a = SecretAuthenticator("a", 1, SECRET)
    async with listening(handshake_timeout=2.0) as (listener, queue):
        handshake = a.dial(b"", 0, 2)
        control = await open_flow(listener.address, handshake)
        data = await open_flow(listener.address, a.dial(handshake.session, 1, 2))
        assert await read_to_end(control) == b""
        assert await read_to_end(data) == b""
        control.close()
        data.close()
        assert "1 of 2 data flows" in _drops(caplog)[0]
        with pytest.raises(ProtocolError, match="not know the link"):
            await _refused(listener.address, a, handshake.session)
        assert queue.empty()


async def test_the_oldest_links_without_data_flows_make_room() -> None:
    async with listening(max_pending_handshakes=2) as (listener, queue):
        agents = [SecretAuthenticator(f"a{k}", 10 + k, SECRET) for k in range(9)]
        handshakes = [agent.dial(b"", 0, 1) for agent in agents]
        sockets = [await open_flow(listener.address, handshake) for handshake in handshakes]
        assert await read_to_end(sockets[0]) == b""
        sockets.append(await open_flow(listener.address, agents[8].dial(handshakes[8].session, 1, 1)))
        link, _ = await queue.get()
        assert link.peer.node == "a8"
        for sock in sockets:
            sock.close()


async def _refused(address: str, a: SecretAuthenticator, session: bytes) -> None:
    sock = await open_socket(address)
    try:
        handshake = a.dial(session, 2, 2)
        await write(sock, handshake.start())
        handshake.receive(await read_to_end(sock))
    finally:
        sock.close()


async def test_a_data_flow_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    a = SecretAuthenticator("a", 1, SECRET)
    async with listening() as (listener, queue):
        handshake = a.dial(b"", 0, 2)
        sockets = [await open_flow(listener.address, handshake)]
        sockets += [await open_flow(listener.address, a.dial(handshake.session, 1, 2)) for _ in range(2)]
        assert await read_to_end(sockets[2]) == b""
        assert "data flow 1 of one link twice" in _drops(caplog)[0]
        sockets.append(await open_flow(listener.address, a.dial(handshake.session, 2, 2)))
        link, events = await queue.get()
        assert link.peer.node == "a"
        for sock in sockets:
            sock.close()
        await events.until_closed()


async def test_closing_a_listener_drops_unfinished_handshakes(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as (listener, _):
        sock = await open_socket(listener.address)
        handshake = SecretAuthenticator("a", 1, SECRET).dial(b"", 0, 2)
        waiting = await open_flow(listener.address, handshake)
        await listener.close()
        assert await read_to_end(sock) == await read_to_end(waiting) == b""
        sock.close()
        waiting.close()
        assert _drops(caplog) == []


async def test_a_connection_that_came_in_the_turn_of_the_end_is_closed(recwarn: pytest.WarningsRecorder) -> None:
    async with listening() as (listener, _):
        host, port = parse(listener.address)
        with socket.create_connection((host, port)) as sock:
            listener._acceptable()  # type: ignore[attr-defined] # its task has not begun when the listener closes
            await listener.close()
            sock.setblocking(False)
            assert await read_to_end(sock) == b""
    gc.collect()
    assert [str(warning.message) for warning in recwarn if warning.category is ResourceWarning] == []


async def test_the_wildcard_of_ipv6_takes_ipv4_too() -> None:
    async with listening(address="tcp://[::]:0") as (listener, queue):
        port = parse(listener.address)[1]
        for address in (f"tcp://127.0.0.1:{port}", f"tcp://[::1]:{port}"):
            link = await TcpTransport().connect(address, Recorder(), _options())
            far, _ = await queue.get()
            assert link.remote_address == far.local_address == address
            assert link.local_address == far.remote_address
            await link.close(20)


async def test_every_address_of_a_host_name_is_tried() -> None:
    """``localhost`` is ``::1`` first on most machines, where nobody listens here."""
    async with listening() as (listener, _):
        address = f"tcp://localhost:{parse(listener.address)[1]}"
        link = await TcpTransport().connect(address, Recorder(), _options())
        assert link.remote_address == listener.address
        await link.close(20)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("tcp://192.0.2.1:0", "does not have that address"),
        ("tcp://[fe80::1%nosuch0]:0", "this machine has no interface 'nosuch0'"),
        ("tcp://127.0.0.1", "malformed"),
        ("tcp://127.0.0.1:", "malformed"),
        ("tcp://:4123", "malformed"),
        ("tcp://127.0.0.1:65536", "malformed"),
        ("tcp://127.0.0.1:-1", "malformed"),
        ("tcp://127.0.0.1:４", "malformed"),
        ("tcp://::1:4123", "malformed"),
        ("tcp://[127.0.0.1]:4123", "malformed"),
        ("udp://127.0.0.1:4123", "malformed"),
    ],
)
async def test_addresses_that_cannot_be(address: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        async with listening(address=address):
            pass


def test_addresses_are_written_as_they_are_read() -> None:
    for address in ("tcp://127.0.0.1:1", "tcp://[::1]:65535", "tcp://[fe80::1%lo]:7"):
        assert text(parse(address)) == address
    assert text(("::ffff:192.0.2.7", 5, 0, 0)) == "tcp://192.0.2.7:5"
    assert parse("tcp://node-1.example:4123") == ("node-1.example", 4123)


def test_connections_are_prepared() -> None:
    with socket.socket() as sock:
        prepare(sock, 123_456)
        assert not sock.getblocking()
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 123_456


@asynccontextmanager
async def _impostor(behave: Callable[[socket.socket], Awaitable[None]]) -> AsyncIterator[str]:
    """Listen with something that is no agent; it treats one connection as told."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)

        async def serve() -> None:
            sock, _ = await asyncio.get_running_loop().sock_accept(server)
            with sock:
                await behave(sock)

        task = asyncio.ensure_future(serve())
        try:
            yield text(server.getsockname())
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_an_address_where_something_else_answers() -> None:
    async def http(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_recv(sock, 512)
        await write(sock, b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with _impostor(http) as address:
        with pytest.raises(ProtocolError, match=f"{address}.*does not speak"):
            await TcpTransport().connect(address, Recorder(), _options())


async def test_an_address_that_hangs_up() -> None:
    async def hang_up(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_recv(sock, 512)

    async with _impostor(hang_up) as address:
        with pytest.raises(AgentUnavailable, match="closed during the handshake") as caught:
            await TcpTransport().connect(address, Recorder(), _options())
        assert isinstance(caught.value.__cause__, ConnectionError)


async def test_an_address_that_keeps_silent() -> None:
    async def listen_only(sock: socket.socket) -> None:
        await read_to_end(sock)

    async with _impostor(listen_only) as address:
        with pytest.raises(AgentUnavailable, match="no answer in time") as caught:
            await TcpTransport().connect(address, Recorder(), _options(handshake_timeout=0.05))
        assert isinstance(caught.value.__cause__, TimeoutError)
