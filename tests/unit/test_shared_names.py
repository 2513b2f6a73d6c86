"""What counts as left behind in /dev/shm."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.shared_names import FOLDER, left_behind, shared_names

HOLDER = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name() -> Iterator[Path]:
    """Return a name that is not there, and is not there afterwards."""
    path = FOLDER / f"allreduced-test-{secrets.token_hex(8)}"
    yield path
    path.unlink(missing_ok=True)


def test_a_name_that_stays_is_left_behind(name: Path) -> None:
    before = shared_names()
    name.write_bytes(b"x")
    assert name in left_behind(before, 0.0)
    assert name not in left_behind(shared_names(), 0.0)


def test_a_name_of_another_process_is_not(name: Path) -> None:
    before = shared_names()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mapped\n"
        assert name.exists()
        assert name not in left_behind(before, 0.0)
        holder.communicate()
    assert name in left_behind(before, 0.0)


def test_a_name_that_goes_by_itself_is_not(name: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shared_names()
    name.write_bytes(b"x")
    monkeypatch.setattr("tests.support.shared_names.time.sleep", lambda seconds: name.unlink(missing_ok=True))
    assert name not in left_behind(before)
