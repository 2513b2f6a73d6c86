"""Commands whose output or words cannot be written: an error and a status, no traceback."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys

import pytest

from allreduced.cli.console import OutputLost, complain, is_terminal, say
from allreduced.daemon.log.descriptor import Descriptor
from allreduced.daemon.log.handler import LineHandler
from allreduced.daemon.log.writer import LineWriter

COMMAND = (sys.executable, "-P", "-m", "allreduced.cli.main")


class Full(io.StringIO):
    """A stream on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def run(command: tuple[str, ...], redirect: str) -> subprocess.CompletedProcess[str]:
    shell = ("sh", "-c", f'exec "$@" {redirect}', "sh", *COMMAND, *command)
    names = ("ALLREDUCED_", "PYTHONUNBUFFERED")  # what is in a buffer is written at the end again
    environ = {key: value for key, value in os.environ.items() if not key.startswith(names)}
    return subprocess.run(
        shell, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("command", [("agent", "--check"), ("doctor", "--local"), ("--version",), ("run", "--help")])
@pytest.mark.parametrize(
    ("redirect", "said"),
    [
        (">&-", "allreduced: error: standard output is closed\n"),
        (">/dev/full", "allreduced: error: standard output cannot be written: No space left on device\n"),
    ],
)
def test_output_that_is_lost_is_an_error(command: tuple[str, ...], redirect: str, said: str) -> None:
    done = run(command, redirect)
    assert done.returncode == 1
    assert done.stderr.endswith(said)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full"])
def test_words_that_are_lost_change_no_status(redirect: str) -> None:
    done = run(("agent", "--check", "--quiet"), redirect)
    assert (done.returncode, done.stdout) == (0, "")
    done = run(("agent", "--check", "--config", "/no/such/file.toml"), redirect)
    assert (done.returncode, done.stdout) == (2, "")
    assert run(("agent", "--unknown"), redirect).returncode == 2


def test_a_reader_who_went_away_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([*COMMAND, "--help"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_nothing_is_written_to_streams_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    complain("words")
    assert not is_terminal()
    with pytest.raises(OutputLost, match="is closed"):
        say("output")
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", Full())
    complain("words")
    with pytest.raises(OutputLost, match="cannot be written: No space left on device"):
        say("output")


def test_what_the_encoding_lacks_is_written_as_an_escape(capsys: pytest.CaptureFixture[str]) -> None:
    say("é c\udcffg.toml")
    assert capsys.readouterr().out == "é c\\udcffg.toml\n"


def test_a_line_of_the_log_that_is_wrong_is_told_as_logging_does(monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("allreduced.test", logging.WARNING, "file.py", 7, "%d", ("x",), None, "function")
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    LineHandler(LineWriter(Descriptor(2, "utf-8"))).handle(record)
    assert "TypeError" in said.getvalue()
