"""Connecting to an agent whose queue of connections is full: that is waited for, and no other agent is started."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from allreduced.cli.main import main
from allreduced.client import AsyncCommunicator, connect
from allreduced.client.attach import attach, read_options
from allreduced.client.endpoint import ACCEPT_SECONDS, QueueFull, reach
from allreduced.client.inquiry import ask_status
from allreduced.client.private_agent import private_agent
from allreduced.client.waiting import Wait, drive
from allreduced.core.addresses import SocketAddress, parse_socket
from allreduced.daemon.doctor.local_socket import socket_facts


@contextmanager
def full_queue(address: SocketAddress) -> Iterator[socket.socket]:
    """Yield a socket that listens there, and whose queue has no room."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listening.bind(address.sockaddr)
        listening.listen(1)
        while True:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            if waiting.connect_ex(address.sockaddr):
                break
        yield listening


@pytest.fixture
def address() -> SocketAddress:
    return parse_socket(f"@allreduced-test-{secrets.token_hex(8)}")


def test_it_waits_until_there_is_room(address: SocketAddress) -> None:
    with full_queue(address) as listening:
        connecting = reach(address, path="socket", until=time.monotonic() + 20)
        for _ in range(3):
            wait = next(connecting)
            assert (wait.descriptor, wait.write) == (-1, False)
            assert wait.until <= time.monotonic() + 0.06  # there may be room soon
        with listening.accept()[0], pytest.raises(StopIteration) as found:
            next(connecting)
        with found.value.value as connection:
            assert connection.getpeername() == address.sockaddr.encode() or connection.getpeername() == address.sockaddr
            assert connection.gettimeout() == 0.0


def test_it_ends_at_its_time_with_what_is_wrong(address: SocketAddress) -> None:
    with full_queue(address), pytest.raises(QueueFull) as caught:
        drive(reach(address, path="socket", until=time.monotonic() + 0.02))
    assert caught.value.message == f"the agent at {address} takes no connection: its queue is full"
    assert "floods" in caught.value.hint


def test_an_agent_that_accepts_nobody_is_waited_for_30_seconds(
    address: SocketAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    with full_queue(address):
        connecting = reach(address, path="socket", until=time.monotonic() + 300)
        now = time.monotonic()
        assert isinstance(next(connecting), Wait)
        monkeypatch.setattr(time, "monotonic", lambda: now + ACCEPT_SECONDS + 1)
        with pytest.raises(QueueFull):
            next(connecting)


def test_connect_and_status_say_it(address: SocketAddress) -> None:
    with full_queue(address):
        with pytest.raises(QueueFull, match="its queue is full"):
            connect(job="j", rank=0, size=1, socket=address.text, deadline=0.02)
        with pytest.raises(QueueFull, match="its queue is full"):
            asyncio.run(_connect(address))
        with pytest.raises(QueueFull, match="its queue is full"):
            ask_status(address, path="socket", others=False, timeout=0.02)


async def _connect(address: SocketAddress) -> None:
    await AsyncCommunicator.connect(job="j", rank=0, size=1, socket=address.text, deadline=0.02)


@pytest.mark.parametrize("where", ["private", "service"])
def test_no_private_agent_is_started_beside_one_whose_queue_is_full(
    where: str, address: SocketAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("allreduced.client.attach.start", lambda command, until: started.append(command))
    options = read_options(
        job=f"j{secrets.token_hex(8)}",
        group="world",
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        socket=None,
        deadline=0.02,
        default_deadline=None,
        shared_memory=True,
        agent="auto",
    )
    if where == "private":
        options = replace(options, agent=replace(options.agent, socket=None, places=()))
        address = private_agent(options.launch, options.agent, uid=os.geteuid(), host="node").socket
    else:
        options = replace(options, agent=replace(options.agent, socket=None, places=(address.text,)))
    with full_queue(address), pytest.raises(QueueFull, match="its queue is full"):
        drive(attach(options))
    assert started == []


def test_who_waits_for_room_is_told_after_a_while(
    address: SocketAddress, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("allreduced.client.attach._SILENT_SECONDS", 0.02)
    with full_queue(address), pytest.raises(QueueFull):
        connect(job="j", rank=0, size=1, socket=address.text, deadline=1.0)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.message.startswith("event=agent_waited_for ")
    assert "its queue is full" in record.message


def test_status_does_not_say_that_no_agent_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = parse_socket(str(tmp_path / "agent.sock"))
    monkeypatch.delenv("ALLREDUCED_SOCKET", raising=False)
    monkeypatch.setattr("allreduced.cli.status.usual_places", lambda _: (place.text,))
    with full_queue(place):
        assert main(["status", "--timeout", "0.02"]) == 1
    told = capsys.readouterr().err
    assert f"the agent at {place} takes no connection: its queue is full" in told
    assert "no agent runs" not in told


def test_the_doctor_looks_more_than_once(address: SocketAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_queue(address) as listening:
        monkeypatch.setattr("allreduced.daemon.doctor.local_socket.time.sleep", lambda _: None)
        assert socket_facts(address.text).answer == errno.EAGAIN
        accepted: list[socket.socket] = []
        monkeypatch.setattr(
            "allreduced.daemon.doctor.local_socket.time.sleep", lambda _: accepted.append(listening.accept()[0])
        )
        assert socket_facts(address.text).answer == 0
        assert len(accepted) == 1
        accepted[0].close()
