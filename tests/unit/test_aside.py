"""Work beside the loop: its result, its error, and an end that does not wait for it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from allreduced.core.aside import run_aside

BOUND = 20.0


async def test_results_and_errors_come_back() -> None:
    assert await asyncio.wrap_future(run_aside(lambda: threading.current_thread().name, "reading")) == "reading"
    with pytest.raises(ZeroDivisionError):
        await asyncio.wrap_future(run_aside(lambda: 1 // 0, "dividing"))


async def test_no_thread_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="no thread for reading"):
        run_aside(lambda: None, "reading")


def test_the_end_of_a_loop_waits_for_no_work() -> None:
    begun, told = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return told.wait(BOUND)

    async def give_up() -> None:
        waiting = asyncio.ensure_future(asyncio.wrap_future(run_aside(work, "reading")))
        while not begun.is_set():  # noqa: ASYNC110 # a thread sets it
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(give_up())
    assert not told.is_set()
    told.set()
