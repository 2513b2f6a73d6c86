"""What connections cost at the two doors of an agent: strangers are charged for, and who is known is not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.contract.conftest import Recorder
from tests.support.local_plane import Plane, open_plane
from tests.unit.raw_peer import SECRET, listening, open_flow, open_socket, read_to_end, turns_until, write

from allreduced.core.accept_budget import AcceptBudget
from allreduced.core.errors import AuthenticationError
from allreduced.daemon.local_limits import LocalLimits
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports.base import LinkOptions, Listener
from allreduced.transports.tcp import TcpTransport


class Account(AcceptBudget):
    """A budget that never refills, and tells what was charged for and not given back."""

    charged = 0
    burst = 100.0

    def __init__(self, **_: object) -> None:
        super().__init__(rate=1e-9, burst=self.burst)
        type(self).charged = 0

    def take(self, now: float) -> None:
        type(self).charged += 1
        super().take(now)

    def give_back(self) -> None:
        type(self).charged -= 1
        super().give_back()


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> type[Account]:
    class Mine(Account):
        pass

    monkeypatch.setattr("allreduced.transports.tcp.listener.AcceptBudget", Mine)
    monkeypatch.setattr("allreduced.daemon.local_server.AcceptBudget", Mine)
    return Mine


def _options(secret: bytes = SECRET, node: str = "a") -> LinkOptions:
    return LinkOptions(SecretAuthenticator(node, 1, secret), handshake_timeout=20.0)


async def _silent(listener: Listener) -> None:
    sock = await open_socket(listener.address)
    assert await read_to_end(sock) == b""
    sock.close()


async def _garbage(listener: Listener) -> None:
    sock = await open_socket(listener.address)
    await write(sock, b"GET / HTTP/1.1\r\n\r\n")
    await read_to_end(sock)
    sock.close()


async def _another_secret(listener: Listener) -> None:
    with pytest.raises(AuthenticationError):
        await TcpTransport().connect(listener.address, Recorder(), _options(b"another"))


async def _flow_twice(listener: Listener) -> None:
    """One flow of three is known, and then is one too many: it ends."""
    a = SecretAuthenticator("a", 1, SECRET)
    handshake = a.dial(b"", 0, 2)
    sockets = [await open_flow(listener.address, handshake)]
    sockets += [await open_flow(listener.address, a.dial(handshake.session, 1, 2)) for _ in range(2)]
    assert await read_to_end(sockets[2]) == b""
    for sock in sockets:
        sock.close()


@pytest.mark.parametrize(("stranger", "charged"), [(_silent, 1), (_garbage, 1), (_another_secret, 1), (_flow_twice, 1)])
async def test_strangers_at_the_port_are_charged_for(
    stranger: Callable[[Listener], Awaitable[None]], charged: int, account: type[Account]
) -> None:
    timeout = 0.05 if stranger is _silent else 20.0
    async with listening(handshake_timeout=timeout) as (listener, _):
        await stranger(listener)
        await turns_until(lambda: account.charged == charged)


async def test_more_links_than_strangers_may_be_are_made_without_a_wait(account: type[Account]) -> None:
    account.burst = 3.0  # and none comes back by itself
    async with listening() as (listener, queue):
        for number in range(5):
            link = await TcpTransport().connect(listener.address, Recorder(), _options(node=f"a{number}"))
            await queue.get()
            await link.close(20)
        assert account.charged == 0


async def test_agents_of_a_crowd_end_nobody_s_handshake(
    account: type[Account], caplog: pytest.LogCaptureFixture
) -> None:
    """Connections are taken as fast as those before them become known, and no faster."""
    account.burst = 2.0
    async with listening(max_pending_handshakes=4) as (listener, queue):
        made = await asyncio.gather(
            *(TcpTransport().connect(listener.address, Recorder(), _options(node=f"a{number}")) for number in range(12))
        )
        names = {(await queue.get())[0].peer.node for _ in made}
        assert names == {f"a{number}" for number in range(12)}
        assert account.charged == 0
        for link in made:
            await link.close(20)
    assert caplog.records == []


async def test_forty_agents_at_once_are_all_let_in(caplog: pytest.LogCaptureFixture) -> None:
    """Three connections each, where sixteen handshakes may be unfinished."""
    async with listening(max_pending_handshakes=16) as (listener, queue):
        made = await asyncio.gather(
            *(TcpTransport().connect(listener.address, Recorder(), _options(node=f"a{number}")) for number in range(40))
        )
        assert {(await queue.get())[0].peer.node for _ in made} == {f"a{number}" for number in range(40)}
        for link in made:
            await link.close(20)
    assert caplog.records == []


async def _says_nothing(plane: Plane) -> None:
    assert len(await plane.connect().rest()) == 1  # that it said no hello


async def _no_message(plane: Plane) -> None:
    client = plane.connect()
    await client.send_bytes(b"GET / HTTP/1.1\r\n\r\n")
    await client.rest()


async def _hello_and_garbage(plane: Plane) -> None:
    client = await plane.attach()
    await client.send_bytes(bytes(64))
    await client.rest()


@pytest.mark.parametrize("stranger", [_says_nothing, _no_message, _hello_and_garbage])
async def test_strangers_at_the_socket_are_charged_for(
    stranger: Callable[[Plane], Awaitable[None]], account: type[Account]
) -> None:
    timeout = 0.02 if stranger is _says_nothing else 20.0
    async with open_plane(limits=LocalLimits(hello_timeout=timeout)) as plane:
        await stranger(plane)
        await plane.until_clients(0)
        assert account.charged == 1


async def test_more_clients_than_strangers_may_be_attach_without_a_wait(account: type[Account]) -> None:
    account.burst = 2.0
    async with open_plane() as plane:
        clients = [await plane.attach() for _ in range(7)]
        assert account.charged == 0
        for client in clients:
            client.close()
        await plane.until_clients(0)
        assert account.charged == 0
