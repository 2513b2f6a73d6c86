"""The service manager is told how the agent is, and is fed by the loop's own progress only."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
from collections.abc import Iterator

import pytest

from allreduced.daemon.pulse import Pulse
from allreduced.daemon.service_manager import LONGEST_STATUS, ServiceManager, watchdog_seconds


class Manager:
    """The other end of the datagrams."""

    def __init__(self) -> None:
        self.name = f"allreduced-test-{secrets.token_hex(8)}"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(f"\0{self.name}")
        self.sock.settimeout(10.0)

    def environ(self, **more: str) -> dict[str, str]:
        return {"NOTIFY_SOCKET": f"@{self.name}", **more}

    def next(self) -> list[str]:
        return self.sock.recv(4096).decode().split("\n")

    def silent(self) -> bool:
        self.sock.setblocking(False)
        try:
            self.sock.recv(4096)
        except BlockingIOError:
            return True
        finally:
            self.sock.settimeout(10.0)
        return False


@pytest.fixture
def manager() -> Iterator[Manager]:
    manager = Manager()
    with manager.sock:
        yield manager


def test_a_life_as_the_service_manager_hears_of_it(manager: Manager) -> None:
    told = ServiceManager(manager.environ(), clock=lambda: 12345678)
    told.ready("serving")
    told.reloading()
    told.ready("serving more")
    told.stopping("stopping", 12.5)
    told.failed("no\nway")
    told.failed("no files", errno.EMFILE)
    assert [manager.next() for _ in range(6)] == [
        ["READY=1", "STATUS=serving"],
        ["RELOADING=1", "MONOTONIC_USEC=12345678"],
        ["READY=1", "STATUS=serving more"],
        ["STOPPING=1", "EXTEND_TIMEOUT_USEC=12500000", "STATUS=stopping"],
        ["STATUS=no way"],
        ["STATUS=no files", f"ERRNO={errno.EMFILE}"],
    ]


def test_a_status_is_told_when_it_changes_and_is_one_bounded_line(manager: Manager) -> None:
    told = ServiceManager(manager.environ())
    told.alive("one")
    told.alive("one")
    told.alive("x" * 10000)
    assert manager.next() == ["STATUS=one"]
    assert manager.next() == [f"STATUS={'x' * LONGEST_STATUS}"]
    assert manager.silent()


def test_the_watchdog_is_fed_where_there_is_one(manager: Manager) -> None:
    told = ServiceManager(manager.environ(WATCHDOG_USEC="3000000", WATCHDOG_PID=str(os.getpid())))
    assert told.watchdog == 3.0
    told.alive("one")
    told.alive("one")
    assert manager.next() == ["WATCHDOG=1", "STATUS=one"]
    assert manager.next() == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "1500000"}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "7"}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "8"}, None),  # meant for another process
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
    ],
)
def test_when_the_watchdog_bites(environ: dict[str, str], seconds: float | None) -> None:
    assert watchdog_seconds(environ, 7) == seconds


def test_a_status_that_is_no_utf_8_is_told_all_the_same(manager: Manager) -> None:
    told = ServiceManager(manager.environ())
    told.failed("c\udcffg.toml is no TOML")
    assert manager.next() == ["STATUS=c\\udcffg.toml is no TOML"]


def test_no_descriptor_for_a_message_is_no_error(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def socket_of_nobody(*_kind: int) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    told = ServiceManager(manager.environ())
    with monkeypatch.context() as patched:
        patched.setattr("allreduced.daemon.service_manager.socket.socket", socket_of_nobody)
        told.alive("serving")
    assert "event=notify_failed error='Too many open files'" in caplog.text
    told.alive("serving")
    assert manager.next() == ["STATUS=serving"]


@pytest.mark.parametrize(
    "where", ["", "vsock:2:1234", "relative", "/nowhere/at/all", "/nowhere/\udcff", f"/{'x' * 200}"]
)
def test_nobody_who_listens_is_no_error(where: str) -> None:
    told = ServiceManager({"NOTIFY_SOCKET": where})
    told.ready("serving")
    told.alive("serving")
    told.stopping("stopping", 1.0)


def test_a_manager_that_does_not_read_holds_up_no_pulse(manager: Manager, caplog: pytest.LogCaptureFixture) -> None:
    told = ServiceManager(manager.environ(WATCHDOG_USEC="3000000"))
    for _ in range(2000):  # more than its queue takes
        told.alive("serving")
    assert caplog.text.count("event=notify_failed") == 1
    assert manager.next() == ["WATCHDOG=1", "STATUS=serving"]


async def test_the_pulse_is_the_loop_s_own(manager: Manager) -> None:
    pulse = Pulse(ServiceManager(manager.environ(WATCHDOG_USEC="30000")), lambda: "serving")
    assert manager.silent()
    pulse.start()
    try:
        assert pulse.interval == pytest.approx(0.01)
        assert manager.next() == ["WATCHDOG=1", "STATUS=serving"]
        # As long as the loop is held up there is nothing more, however long that takes.
        assert manager.silent()
        loop = asyncio.get_running_loop()
        manager.sock.setblocking(False)
        assert await loop.sock_recv(manager.sock, 4096) == b"WATCHDOG=1"
    finally:
        pulse.close()
        pulse.close()


async def test_without_a_service_manager_there_is_no_pulse() -> None:
    pulse = Pulse(ServiceManager({"WATCHDOG_USEC": "30000"}), lambda: pytest.fail("nobody asked"))
    pulse.start()
    assert pulse.interval == 5.0
    pulse.close()
