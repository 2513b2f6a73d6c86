"""Work that blocks and cannot be stopped, such as reading a file or asking a resolver, beside the event loop.

Each piece of work has a thread of its own, which keeps neither the loop nor the end of the process waiting. The threads
of the loop's own executor do that: a pipe in the place of a file would keep an agent from ending.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

T = TypeVar("T")

MORE_THREADS: Final = "raise the limit on processes and threads (ulimit -u, pids.max of the control group)"
"""What helps where there can be no further thread."""


def run_aside(work: Callable[[], T], name: str) -> Future[T]:
    """Do ``work`` in a thread called ``name``; return what it will return or raise.

    Await it with ``asyncio.wrap_future``. Cancelling ends the wait only.

    :raises OSError: there can be no further thread.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # one who does not wait any more must not cancel it for others
    try:
        threading.Thread(target=_do, args=(work, done), name=name, daemon=True).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, f"no thread for {name}") from error
    return done


def _do(work: Callable[[], T], done: Future[T]) -> None:
    try:
        result = work()
    except Exception as error:  # whatever it is, who waits gets it
        done.set_exception(error)
    else:
        done.set_result(result)
