"""Writes lines in a thread of its own, so that nothing which takes none of them holds up who has something to say.

``logging.handlers.QueueHandler`` and ``QueueListener`` are the standard library's way; what they lack is needed here: a
bound of the queue with a count of what it did not take, and an end that waits for the thread only so long.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

MOST: Final = 1 << 20
"""Characters and bytes that may wait. One line may be longer."""

PATIENCE: Final = 1.0
"""Seconds that the end waits for lines that nobody takes."""


@dataclass(frozen=True, slots=True)
class Line:
    """``text``: with its end. ``entry``: the same for systemd's journal, in its protocol; empty where there is none."""

    text: str
    entry: bytes = b""

    @property
    def size(self) -> int:
        """Return what it takes of the writer's bound."""
        return len(self.text) + len(self.entry)


class Outlet(Protocol):
    """Where lines go. It is used by one thread at a time."""

    def write(self, line: Line) -> None:
        """Write the line, however long that takes.

        :raises OSError: it is lost.
        """

    def close(self) -> None:
        """Close what the outlet has opened. Lines may come all the same."""


class LineWriter:
    """Takes lines at any time, from any thread, and never waits; a thread hands them to ``outlet``, in order.

    Where more than ``most`` waits the lines that come are lost until all that waited is written, and so is a line that
    the outlet refuses. The next thing that is written then is the line that ``tell`` makes of their number. The thread
    begins with the first line and keeps neither the process nor a fork's child from ending.
    """

    def __init__(self, outlet: Outlet, *, most: int = MOST, patience: float = PATIENCE) -> None:
        self._outlet = outlet
        self._most = most
        self._patience = self._left = patience
        self.tell: Callable[[int], Line] | None = None
        """Called in the thread. Until it is set losses are only counted."""
        self._changed = threading.Condition()  # of a lock that one thread may take twice: a signal's handler may log
        self._thread: threading.Thread | None = None
        self._starting = False
        self._waiting: deque[Line] = deque()
        """The first of them is about to be written."""
        self._size = 0
        self._full = False
        self._writing = False
        self._closed = False
        self._lost = 0
        self._untold = 0

    @property
    def lost(self) -> int:
        """Return how many lines were lost so far."""
        return self._lost

    def put(self, line: Line) -> None:
        """Have a line written some time, or count it."""
        with self._changed:
            self._closed = False
            if self._full or (self._waiting and self._size + line.size > self._most):
                self._full = True
                self._lost += 1
                self._untold += 1
            else:
                self._waiting.append(line)
                self._size += line.size
            self._start()
            self._changed.notify_all()

    def finish(self) -> bool:
        """Wait until all is written; return whether it is.

        Waits that come to nothing take ``patience`` seconds at most, all together.
        """
        with self._changed:
            if not self._idle() and not self._start():
                while not self._idle():  # there can be no thread, and now nothing else is to be done
                    self._step()
            began = time.monotonic()
            done = self._changed.wait_for(self._idle, self._left)
            self._left = self._patience if done else max(0.0, self._left - (time.monotonic() - began))
            return done

    def close(self) -> None:
        """Finish, and let the thread end. A later line begins another one."""
        self.finish()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._outlet.close()

    def _idle(self) -> bool:
        return not (self._waiting or self._full or self._writing)

    def _start(self) -> bool:
        if self._starting or (self._thread is not None and self._thread.is_alive()):
            return True
        self._thread, self._starting = threading.Thread(target=self._run, name="log", daemon=True), True
        try:
            self._thread.start()  # meanwhile a signal or the collector may have something to say, in this thread
        except RuntimeError:  # there can be no further thread now; whoever comes next tries again
            self._thread = None
            return False
        finally:
            self._starting = False
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._idle())
                if self._idle():
                    self._thread = None
                    return
            self._step()

    def _step(self) -> None:
        """Write what comes next: the number of lost lines, and the first line that waits."""
        with self._changed:
            line = self._waiting[0] if self._waiting else None
            if line is None:
                self._full = False  # here the gap ends; what comes from now on goes behind its number
            tell = self.tell
            lost = 0 if tell is None or self._full else self._untold
            self._untold -= lost
            self._writing = True
        refused = 0
        try:
            if tell is not None and lost:
                self._outlet.write(tell(lost))
                lost = 0
            if line is not None:
                self._outlet.write(line)
        except OSError:
            refused = int(line is not None)
        finally:
            with self._changed:
                if line is not None:
                    self._waiting.popleft()
                    self._size -= line.size
                self._lost += refused
                self._untold += lost + refused
                self._writing = False
                self._changed.notify_all()
