"""Procedures that wait, written once for blocking and asyncio callers.

A procedure is a generator that yields a :class:`Wait` where it has to wait, and returns its value. :func:`drive` runs
one in a blocking way; ``async_waiting.drive`` runs one on an event loop.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until ``descriptor`` (-1: none) can be read, or written where ``write`` is true, but not past ``until``.

    It may end earlier without a reason. ``until`` is on the clock of ``time.monotonic``.
    """

    descriptor: int
    write: bool
    until: float


Procedure: TypeAlias = Generator[Wait, None, T]


SLICE_SECONDS = 1
"""How long anyone waits without looking whether the wait still makes sense."""


def drive(procedure: Procedure[T], check: Callable[[], None] | None = None) -> T:
    """Run the procedure to its end in this thread.

    ``check`` is called every now and then; what it raises ends the procedure.
    """
    while True:
        try:
            wait = next(procedure)
        except StopIteration as stop:
            value: T = stop.value
            return value
        try:
            until = wait.until if check is None else min(wait.until, time.monotonic() + SLICE_SECONDS)
            poll(wait.descriptor, read=True, write=wait.write, until=until)
            if check is not None:
                check()
        except BaseException as error:
            procedure.throw(error)


def poll(descriptor: int, *, read: bool, write: bool, until: float) -> None:
    """Wait until the descriptor (-1: none) is ready, has failed, or the time has come."""
    seconds = min(max(until - time.monotonic(), 0.0), 3600.0)
    if descriptor < 0:
        time.sleep(seconds)
        return
    poller = select.poll()
    poller.register(descriptor, (select.POLLIN if read else 0) | (select.POLLOUT if write else 0))
    # Rounded up: a wait for the last fraction of a millisecond must not become a busy loop.
    poller.poll(int(seconds * 1000) + (1 if seconds else 0))
