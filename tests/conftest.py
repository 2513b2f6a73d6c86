"""Shared by all tests: both event loops, and the rule that a test leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping

import psutil
import pytest
import uvloop
from tests.support.shared_names import left_behind, shared_names

# libuv makes one pipe for signals per process, with the first loop, and keeps it.
uvloop.new_event_loop().close()


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


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a descriptor, a thread, a child process or a name in /dev/shm behind."""
    descriptors, threads = _foreign(_descriptors()), set(threading.enumerate())
    children, shm = _children(), shared_names()
    yield
    gc.collect()
    left = {fd: target for fd, target in _foreign(_descriptors()).items() if descriptors.get(fd) != target}
    assert not left, f"descriptors left behind: {left}"
    running = [thread for thread in threading.enumerate() if thread not in threads]
    assert not running, f"threads left behind: {running}"
    orphans = _children() - children
    assert not orphans, f"processes left behind: {orphans}"
    names = left_behind(shm)
    assert not names, f"shared memory left behind: {names}"
