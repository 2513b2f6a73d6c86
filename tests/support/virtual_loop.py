"""An event loop whose time passes only while it has nothing to do: timers ring at once, in order, at exact times."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.asleep: Callable[[], None] | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("the loop waits for something that can never happen")
        if not ready and timeout is not None:
            self.now += timeout
            if self.asleep is not None:
                self.asleep()
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nothing in it may wait for other threads or processes."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._clock.now

    @property
    def asleep(self) -> Callable[[], None] | None:
        """Called when time has passed, before anything runs. What comes in meanwhile is not noticed in that turn."""
        return self._clock.asleep

    @asleep.setter
    def asleep(self, asleep: Callable[[], None] | None) -> None:
        self._clock.asleep = asleep

    def stall(self, seconds: float) -> None:
        """Let time pass in which nothing runs, as when the process is stopped."""
        self._clock.now += seconds


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on a loop of its own in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
