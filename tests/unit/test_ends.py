"""All that an agent has started is ended, in order, whatever goes wrong on the way."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest
from tests.support.certificates import TestAuthority

from allreduced.daemon.agent import AgentOptions, run_agent
from allreduced.daemon.driver import Driver
from allreduced.daemon.ends import End, Ends
from allreduced.daemon.local_server import LocalServer
from allreduced.daemon.settings import Settings
from allreduced.daemon.settings_reader import parse

PARTS = ["status", "discovery", "peers", "entrance", "server", "driver", "kernels", "memory", "arenas"]


async def test_what_came_last_ends_first_whether_it_is_awaited_or_not() -> None:
    ended: list[str] = []

    async def slow() -> None:
        await asyncio.sleep(0)
        ended.append("b")

    ends = Ends()
    ends.push("a", lambda: ended.append("a"))
    ends.push("b", slow)
    ends.push("c", lambda: ended.append("c"))
    assert await ends.close() == ()
    assert ended == ["c", "b", "a"]
    assert await ends.close() == ()
    assert ended == ["c", "b", "a"]


async def test_an_end_that_raises_is_told_and_keeps_no_other_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    async def broken() -> None:
        raise RuntimeError("stuck")

    ends = Ends()
    ends.push("a", lambda: ended.append("a"))
    ends.push("b", broken)
    ends.push("c", lambda: ended.append("c"))
    ends.push("d", [].pop)
    assert await ends.close() == ("d", "b")
    assert ended == ["c", "a"]
    assert [(record.getMessage(), bool(record.exc_info)) for record in caplog.records] == [
        ("event=defect ending=d", True),
        ("event=defect ending=b", True),
    ]


async def test_being_cancelled_keeps_no_other_from_ending() -> None:
    ended: list[str] = []
    ends = Ends()
    ends.push("a", lambda: ended.append("a"))
    ends.push("b", asyncio.Event().wait)
    closing = asyncio.get_running_loop().create_task(ends.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert ended == ["a"]


pytestmark = pytest.mark.usefixtures("root_logger")


@pytest.fixture(autouse=True)
def hang_ups_are_heard() -> Iterator[None]:
    """Let agents here hear SIGHUP where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what has ended, or failed to."""
    ended: list[str] = []
    push = Ends.push

    def noting(self: Ends, what: str, end: End) -> None:
        def noted() -> Awaitable[object] | None:
            ended.append(what)
            return end()

        push(self, what, noted)

    monkeypatch.setattr(Ends, "push", noting)
    return ended


def settings(folder: Path, text: str = "") -> Settings:
    return parse(f'[agent]\nnode = "a"\nsocket = "{folder}/agent.sock"\n[engine]\nthreads = 1\n{text}', "", {}, {})


def stop(*_: str) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_an_agent_ends_its_parts_in_order(tmp_path: Path, pushed: list[str]) -> None:
    files = TestAuthority.make(tmp_path).issue("a")
    security = f'mode = "mtls"\nca = "{files.ca}"\ncertificate = "{files.certificate}"\nkey = "{files.key}"\n'
    given = settings(tmp_path, f'[metrics]\nlisten = "127.0.0.1:0"\n[security]\n{security}')
    assert run_agent(given, AgentOptions(on_ready=stop, reload=lambda: given), {}) == 0
    signals = ["signals"] * 3
    assert pushed == ["reload", "certificates", *PARTS, "monitoring", "pulse", *signals]
    pushed.clear()
    assert run_agent(settings(tmp_path), AgentOptions(on_ready=stop, private=True), {}) == 0
    assert pushed == ["lifetime", *PARTS, "pulse", *signals]


def test_parts_that_cannot_end_keep_no_other_from_ending(
    tmp_path: Path,
    pushed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    root_logger: logging.Logger,
) -> None:
    close = Driver.close

    def broken(self: Driver) -> None:
        close(self)
        raise RuntimeError("stuck")

    async def broken_too(self: LocalServer) -> None:
        self.stop_listening()
        raise RuntimeError("stuck, too")

    monkeypatch.setattr(Driver, "close", broken)
    monkeypatch.setattr(LocalServer, "close", broken_too)
    assert run_agent(settings(tmp_path), AgentOptions(on_ready=stop, private=True), {}) == 1
    assert pushed[: len(PARTS) + 2] == ["lifetime", *PARTS, "pulse"]
    root_logger.handlers[0].flush()
    logged = capfd.readouterr().err
    assert [line.rpartition(" ")[2] for line in logged.splitlines() if "event=defect" in line] == [
        "ending=server",
        "ending=driver",
    ]


def test_a_start_that_fails_ends_what_was_there(tmp_path: Path, pushed: list[str]) -> None:
    def broken(*_: str) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        run_agent(settings(tmp_path), AgentOptions(on_ready=broken), {})
    assert pushed[: len(PARTS) + 1] == [*PARTS, "pulse"]
    assert not (tmp_path / "agent.sock").exists()
