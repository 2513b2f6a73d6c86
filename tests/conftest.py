"""Shared by all tests: both event loops, and the rule that a test leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path

import psutil
import pytest
import uvloop

# libuv makes one pipe for signals per process, with the first loop, and keeps it.
uvloop.new_event_loop().close()

ENDING = 5.0
"""Seconds in which what has done its work must be gone."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every asynchronous test on asyncio and on uvloop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what the imports made out of the collector, which looks at everything after each test."""
    gc.collect()
    gc.freeze()


def _descriptors() -> dict[str, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 # os.listdir closes its own descriptor before we look
        try:
            found[entry] = os.readlink(f"/proc/self/fd/{entry}")  # noqa: PTH115 # targets such as "socket:[1]" are no paths
        except FileNotFoundError:
            continue
    return found


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _foreign(found: Mapping[str, str]) -> dict[str, str]:
    # pytest's own capture and log files may be opened in the middle of a test
    own = ("/dev/null", "/dev/pts/", "/tmp/pytest-")
    return {fd: target for fd, target in found.items() if not target.startswith(own)}


def _shared_memory(but: Set[Path] = frozenset()) -> set[Path]:
    return set(Path("/dev/shm").iterdir()) - but


def _ends(thread: threading.Thread) -> bool:
    """Return whether a thread is at its end: one that has handed its result over may not have got that far."""
    thread.join(ENDING)
    return not thread.is_alive()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a descriptor, a thread, a child process or a name in /dev/shm behind."""
    descriptors, threads = _foreign(_descriptors()), set(threading.enumerate())
    children, shm = _children(), _shared_memory()
    yield
    gc.collect()
    left = {fd: target for fd, target in _foreign(_descriptors()).items() if descriptors.get(fd) != target}
    assert not left, f"descriptors left behind: {left}"
    running = [thread for thread in threading.enumerate() if thread not in threads and not _ends(thread)]
    assert not running, f"threads left behind: {running}"
    orphans = _children() - children
    assert not orphans, f"processes left behind: {orphans}"
    names = _shared_memory(shm)
    until = time.monotonic() + ENDING
    while names and time.monotonic() < until:  # another process of this machine may have one for a moment
        time.sleep(0.05)
        names = _shared_memory(shm)
    assert not names, f"shared memory left behind: {names}"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Make a folder that everybody may enter, as those above ``tmp_path`` are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """Put logging back as it was."""
    root, ours = logging.getLogger(), logging.getLogger("allreduced")
    handlers, level, our_level = root.handlers[:], root.level, ours.level
    yield root
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)
