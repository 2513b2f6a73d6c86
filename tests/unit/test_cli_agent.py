"""`allreduced agent` ends in a known way, whatever ends it."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allreduced.cli.main import main
from allreduced.core.errors import InternalError, from_wire
from allreduced.daemon import agent, logs, settings_reader
from allreduced.daemon.agent import AgentOptions
from allreduced.daemon.log.formats import TextFormatter
from allreduced.daemon.settings import Settings


@pytest.fixture(autouse=True)
def stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave standard error to the tests: an agent takes it for the rest of its process."""
    monkeypatch.setattr(logs, "take_stderr", lambda: None)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Be the service manager; what is returned gives the lines of each message so far."""
    name = f"allreduced-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        sock.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")

        def heard() -> list[str]:
            lines = []
            while True:
                try:
                    lines.append(sock.recv(4096).decode())
                except BlockingIOError:
                    return lines

        yield heard


def test_a_start_that_fails_as_nobody_foresaw_is_told_to_all_who_wait(
    told: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run_agent(settings: Settings, options: AgentOptions) -> int:
        raise OSError(errno.ENFILE, "Too many open files in system")

    monkeypatch.setattr(agent, "run_agent", run_agent)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        assert main(["agent", "--socket", "@a", "--ready-fd", str(writing)]) == 1
        line = json.loads(pipe.read())
    said = "the agent could not be started: OSError(23, 'Too many open files in system')"
    error = from_wire(line["error"])
    assert isinstance(error, InternalError)
    assert error.message == said
    (message,) = told()
    status, number = message.split("\n")
    assert status.startswith(f"STATUS=not started: {said}")
    assert number == "ERRNO=23"
    assert capsys.readouterr().err.startswith(f"allreduced: error: {said}\n  hint: ")
    (record,) = [record for record in caplog.records if record.name == "allreduced.agent"]
    assert (record.levelno, record.exc_info is not None) == (logging.ERROR, True)
    line, _, traceback = TextFormatter("a").format(record).partition("\n")
    assert line.endswith(""" event=not_started error="OSError(23, 'Too many open files in system')\"""")
    assert traceback.startswith("Traceback")


def test_memory_that_is_short_before_the_settings_are_read(
    told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> Settings:
        raise MemoryError

    monkeypatch.setattr(settings_reader, "load", load)
    assert main(["agent"]) == 1
    (message,) = told()
    assert message.startswith("STATUS=not started: the agent could not be started: MemoryError()")
    assert main(["agent", "--check"]) == 1
    assert told() == []
    assert capsys.readouterr().err.count("allreduced: error: the agent could not be started: MemoryError()\n") == 2


def test_an_end_that_nobody_foresaw_is_no_failed_start(
    told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run_agent(settings: Settings, options: AgentOptions) -> int:
        assert options.on_ready is not None
        options.on_ready("@a", "")
        raise RuntimeError("no way out")

    monkeypatch.setattr(agent, "run_agent", run_agent)
    other = tmp_path / "other"
    with other.open("wb") as file:  # the ready line was written, and its descriptor may be another file by now
        assert main(["agent", "--socket", "@a", "--ready-fd", str(file.fileno())]) == 1
    assert other.read_bytes() == b""
    (message,) = told()
    assert message.startswith("STATUS=ended: the agent ended: RuntimeError('no way out')")
    assert "event=ended error=\"RuntimeError('no way out')\"" in caplog.text
