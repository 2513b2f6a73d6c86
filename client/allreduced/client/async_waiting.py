"""Procedures that wait, run on an event loop. See :mod:`allreduced.client.waiting`."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar, cast

from allreduced.client.waiting import Procedure, Wait

T = TypeVar("T")


async def drive(procedure: Procedure[T]) -> T:
    """Run the procedure to its end on the running loop. Cancelling closes what it had opened."""
    try:
        while True:
            try:
                wait = next(procedure)
            except StopIteration as stop:
                return cast("T", stop.value)
            await _ready(wait)
    finally:
        procedure.close()


async def _ready(wait: Wait) -> None:
    seconds = max(wait.until - time.monotonic(), 0.0)
    if wait.descriptor < 0:
        await asyncio.sleep(seconds)
        return
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(wait.descriptor, wake, ready)
    if wait.write:
        loop.add_writer(wait.descriptor, wake, ready)
    try:
        await asyncio.wait([ready], timeout=seconds)
    finally:
        loop.remove_reader(wait.descriptor)
        if wait.write:
            loop.remove_writer(wait.descriptor)


def wake(future: asyncio.Future[None]) -> None:
    """Set the future, unless it is done."""
    if not future.done():
        future.set_result(None)
