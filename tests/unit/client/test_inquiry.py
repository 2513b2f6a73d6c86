"""Asking an agent what runs: good answers, old agents, silent ones."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.support.local_plane import NOBODY, Plane, open_plane
from tests.support.reports import REPORT

from allreduced.client.inquiry import ClusterStatus, ask_status
from allreduced.core.addresses import parse_socket
from allreduced.core.errors import AgentUnavailable, AllReducedError, AuthenticationError, ProtocolError, to_wire
from allreduced.daemon.ports import ReachablePeer
from allreduced.daemon.status import StatusService
from allreduced.protocol.local import (
    AgentStatus,
    Refused,
    RequestFailed,
    ResultArenaGone,
    ToClient,
    Welcome,
    encode,
)
from allreduced.protocol.peer import Frame
from allreduced.protocol.status import UnansweredReport

SECONDS = 30.0


def ask(name: str, timeout: float = SECONDS) -> ClusterStatus:
    return ask_status(parse_socket(name), path="test", others=True, timeout=timeout)


class SilentPeer:
    def view(self) -> tuple[ReachablePeer, ...]:
        return (ReachablePeer("b", 12, "", "", 3.0),)

    def not_reached(self) -> tuple[tuple[str, str], ...]:
        return ()

    def send_frame(self, node: str, frame: Frame) -> None:
        pass


async def test_reports_and_unanswered_agents_are_returned() -> None:
    async with open_plane() as plane:
        plane.server.use_status(StatusService(lambda uid: REPORT, SilentPeer(), wait=0.0, clock=lambda: 7.0))
        told = await asyncio.to_thread(ask, plane.name)
    assert told.reports == (REPORT,)
    assert told.unanswered == (UnansweredReport("b", "did not answer within 0 s; last heard of 3.0 s ago"),)


async def test_who_may_not_attach_is_told_so() -> None:
    async with open_plane(access=NOBODY) as plane:
        with pytest.raises(AuthenticationError, match="may not attach"):
            await asyncio.to_thread(ask, plane.name)


@contextmanager
def agent_that(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serve one connection in a thread; yields the socket's name."""
    name = f"@allreduced-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name.replace("@", "\0", 1))
        listener.listen()

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield name
        finally:
            thread.join(SECONDS)


def saying(*messages: ToClient) -> Callable[[socket.socket], None]:
    """Return what sends these messages, then waits for the client to go."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"".join(map(encode, messages)))
        while connection.recv(4096):
            pass

    return serve


WELCOME = Welcome(2, "a", 11, 8192, 300.0)
REFUSAL = ProtocolError("message type 9 is not known")


@pytest.mark.parametrize(
    ("messages", "error", "said"),
    [
        ((Welcome(1, "a", 11, 8192, 300.0),), ProtocolError, "speaks version 1 of the protocol, which has no status"),
        ((Refused(to_wire(REFUSAL)),), ProtocolError, "message type 9 is not known"),
        ((WELCOME, Refused(to_wire(REFUSAL))), ProtocolError, "message type 9 is not known"),
        ((WELCOME, RequestFailed(1, to_wire(AuthenticationError("not you")))), AuthenticationError, "not you"),
        ((WELCOME, ResultArenaGone(1)), ProtocolError, "sent ResultArenaGone instead of its status"),
        ((ResultArenaGone(1),), ProtocolError, "sent ResultArenaGone instead of Welcome"),
    ],
)
def test_agents_that_cannot_answer_are_a_clear_error(
    messages: tuple[ToClient, ...], error: type[AllReducedError], said: str
) -> None:
    with agent_that(saying(*messages)) as name, pytest.raises(error, match=said):
        ask(name)


@pytest.mark.parametrize("messages", [(), (WELCOME,), (WELCOME, AgentStatus(1, REPORT))])
def test_a_stopped_agent_is_a_clear_error_in_time(messages: tuple[ToClient, ...]) -> None:
    with agent_that(saying(*messages)) as name, pytest.raises(AgentUnavailable, match="does not answer"):
        ask(name, timeout=0.05)


def test_an_agent_that_ends_is_a_clear_error() -> None:
    with agent_that(lambda connection: None) as name, pytest.raises(AgentUnavailable, match=r"ended|broke"):
        ask(name)


def test_garbage_is_a_clear_error() -> None:
    with (
        agent_that(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad\r\n\r\n")) as name,
        pytest.raises(ProtocolError),
    ):
        ask(name)


def test_no_agent_is_a_clear_error() -> None:
    with pytest.raises(AgentUnavailable, match="nobody listens there"):
        ask(f"@allreduced-test-{secrets.token_hex(8)}")


async def test_an_agent_without_a_desk_tells_nothing() -> None:
    plane: Plane
    async with open_plane() as plane:
        assert await asyncio.to_thread(ask, plane.name) == ClusterStatus((), ())
