"""What processes do."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from allreduced.daemon import process_state as module
from allreduced.daemon.process_state import ProcessState, process_state


def test_this_process_runs() -> None:
    assert process_state(os.getpid()) is ProcessState.RUNNING


def test_a_stopped_process_and_a_dead_one_are_seen() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert process_state(child.pid) is ProcessState.STOPPED
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(child.pid) is ProcessState.DEAD
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid) is ProcessState.UNKNOWN


@pytest.mark.parametrize(
    ("stat", "state"),
    [
        ("7 (a) b) (T) t 1 7", ProcessState.TRACED),
        ("7 (x) D 1", ProcessState.BLOCKED),
        ("7 (x) S 1", ProcessState.RUNNING),
        ("7 (x) ? 1", ProcessState.UNKNOWN),
        ("", ProcessState.UNKNOWN),
    ],
)
def test_the_name_of_a_process_does_not_confuse(
    stat: str, state: ProcessState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROC", tmp_path)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(stat)
    assert process_state(7) is state


def test_a_process_of_another_container_is_unknown() -> None:
    assert process_state(0) is ProcessState.UNKNOWN
