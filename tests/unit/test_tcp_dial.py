"""Dialling: all flows of a link, or none."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tests.contract.conftest import BOUND, Recorder
from tests.unit.raw_peer import SECRET

from allreduced.core.errors import AgentUnavailable
from allreduced.core.resolver import Places
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports.base import LinkOptions, is_refusal
from allreduced.transports.tcp import TcpTransport
from allreduced.transports.tcp.authenticate import authenticate
from allreduced.transports.tcp.stream import PlainStream

FLOWS = 4


class RawListener:
    """A listening socket whose connections a test answers as it likes."""

    def __init__(self) -> None:
        self._sock = socket.create_server(("127.0.0.1", 0))
        self._sock.setblocking(False)
        self._authenticator = SecretAuthenticator("b", 2, SECRET)
        self.accepted: list[socket.socket] = []
        self.address = f"tcp://127.0.0.1:{self._sock.getsockname()[1]}"

    async def accept(self) -> socket.socket:
        async with asyncio.timeout(BOUND):
            sock, _ = await asyncio.get_running_loop().sock_accept(self._sock)
        sock.setblocking(False)
        self.accepted.append(sock)
        return sock

    async def answer(self, sock: socket.socket) -> object:
        """Authenticate a connection; the session lives as long as what is returned."""
        handshake = self._authenticator.answer()
        async with asyncio.timeout(BOUND):
            await authenticate(PlainStream(sock), handshake)
        return handshake

    def close(self) -> None:
        for sock in (self._sock, *self.accepted):
            sock.close()


def _options() -> LinkOptions:
    return LinkOptions(SecretAuthenticator("a", 1, SECRET), flows=FLOWS, connect_timeout=BOUND, handshake_timeout=BOUND)


async def test_all_data_flows_are_opened_at_once() -> None:
    listener, events = RawListener(), Recorder()
    dialling = asyncio.create_task(TcpTransport().connect(listener.address, events, _options()))
    try:
        held = await listener.answer(await listener.accept())
        data = [await listener.accept() for _ in range(FLOWS)]  # none is answered before all are there
        for sock in data:
            await listener.answer(sock)
        link = await dialling
        link.abort(AgentUnavailable("the test is over"))
        await events.until_closed()
        assert held is not None
    finally:
        listener.close()


async def test_a_data_flow_that_ends_ends_the_whole_attempt() -> None:
    listener = RawListener()
    dialling = asyncio.create_task(TcpTransport().connect(listener.address, Recorder(), _options()))
    try:
        held = await listener.answer(await listener.accept())
        data = [await listener.accept() for _ in range(FLOWS)]
        data[2].close()
        with pytest.raises(AgentUnavailable) as caught:
            await dialling
        assert isinstance(caught.value.__cause__, ConnectionError)
        assert held is not None
    finally:
        listener.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_a_host_refuses_only_where_all_of_its_addresses_do(
    order: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as bound:  # which nobody else gets meanwhile, and nobody listens at
        bound.bind(("127.0.0.1", 0))
        closed = bound.getsockname()
        unreachable = ("255.255.255.255", 9)  # the system refuses to connect to it, not a machine
        found: Places = ()

        async def look_up(host: str, port: int) -> Places:
            return found

        monkeypatch.setattr("allreduced.transports.tcp.dial.look_up", look_up)
        for targets, refusal in (((closed, closed), True), ((closed, unreachable), False)):
            found = tuple((socket.AF_INET, targets[at]) for at in order)
            with pytest.raises(AgentUnavailable) as caught:
                await TcpTransport().connect("tcp://node:4123", Recorder(), _options())
            assert is_refusal(caught.value) is refusal
