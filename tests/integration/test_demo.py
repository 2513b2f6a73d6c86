"""`allreduced demo` as users run it, with fewer epochs."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

from tests.integration.agents import complaints


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "allreduced.cli.main", "demo", *arguments]


def test_three_agents_and_six_ranks_train_as_one_process_would() -> None:
    done = subprocess.run(command("--epochs", "12"), capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, complaints(done.stderr)) == (0, [])
    lines = done.stdout.splitlines()
    assert lines[0] == "training on 3 agents with 2 ranks each: 6 ranks, on this machine"
    assert [int(line.split()[1].split("/")[0]) for line in lines[1:13]] == list(range(1, 13))
    assert [line[:4] for line in lines[13:16]] == ["ok  "] * 3
    assert "bit-identical on all 6 ranks" in lines[13]
    assert re.fullmatch(r"all 3 checks passed, in \d+\.\d s", lines[16])


def test_a_check_that_fails_is_status_1() -> None:
    done = subprocess.run(
        command("--nodes", "1", "--ranks-per-node", "1", "--epochs", "1"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert [line[:4] for line in done.stdout.splitlines()[-3:]] == ["ok  ", "ok  ", "FAIL"]
    assert "passed" not in done.stdout


def test_a_terminal_gets_a_live_table() -> None:
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            command("--nodes", "1", "--ranks-per-node", "1", "--epochs", "12"),
            stdout=theirs,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
        ) as process:
            os.close(theirs)
            shown = b""
            while True:
                try:
                    piece = os.read(ours, 65536)
                except OSError:  # the far end is closed
                    break
                shown += piece
            assert process.wait(100) == 0
    finally:
        os.close(ours)
    assert b"steps/s" in shown
    assert b"12/12" in shown
    assert b"all 3 checks passed" in shown
