"""Ctrl-C in the middle of a call: it waits until what is shared with the agent is whole again.

Python runs a signal's handler between any two steps of the main thread, and the handler of SIGINT raises
KeyboardInterrupt. If it came between the sending of a message and the note that it is sent, the message would go out
twice and the agent would drop this rank. So while a call is at work the handler is replaced by one that takes note;
where the call waits, and at its end, the handler of before runs.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from signal import SIGINT
from threading import get_ident
from types import FrameType
from typing import Self, TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], object]

# What the module signal is made of. Its own functions make enumerations of what they get and give, which takes ten
# times as long as the rest of a call of ours.
_builtin = importlib.import_module("_signal")
_get_handler: Callable[[int], object] = _builtin.getsignal
_set_handler: Callable[[int, object], object] = _builtin.signal
_NUMBER = int(SIGINT)
_CLIENT = os.path.dirname(__file__) + os.sep  # noqa: PTH120 # as code objects have it


class Interrupts:
    """Puts SIGINT off in the main thread; other threads never get it, and all this does nothing in them.

    A context manager that may be entered again inside itself.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._before: Handler | None = None
        """The handler that was replaced; None where there is none that could raise."""
        self._noted = False
        self._waiting = False
        self._ours: Handler = self._on_signal
        """One object, so that it can be told from a handler that somebody else sets meanwhile."""
        self.allowed = _Allowed(self)
        """A context manager for waits inside: the signal comes, also the one that came before."""

    def __enter__(self) -> Self:
        if get_ident() == self._main:
            if self._depth == 0:
                self._replace()
            self._depth += 1
        return self

    def __exit__(self, *_error: object) -> None:
        # At the very end, when nothing is half done any more: the handler may raise.
        if get_ident() != self._main or not self._depth:
            return
        self._depth -= 1
        if self._depth or self._before is None:
            return
        before = self._before
        if _get_handler(_NUMBER) is self._ours:
            _set_handler(_NUMBER, before)
        self._before = None
        if self._noted:
            self._noted = False
            before(SIGINT, None)

    def forget(self) -> None:
        """In a forked child: whichever thread forked is the main one, and what it was in the middle of is no more."""
        if self._before is not None and _get_handler(_NUMBER) is self._ours:
            _set_handler(_NUMBER, self._before)
        self._main = get_ident()
        self._depth = 0
        self._before = None
        self._noted = self._waiting = False

    def _replace(self) -> None:
        found = _get_handler(_NUMBER)
        if found is self._ours:  # the handler of another signal raised at the end of a call, or at its begin
            return
        if not callable(found):  # ignored, deadly, or not Python's
            return
        self._noted = self._waiting = False
        try:
            _set_handler(_NUMBER, self._ours)
        except ValueError:  # an interpreter inside another one, which gets no signals
            return
        self._before = found

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not _in_client(frame):
            self._give_back(number, frame)
        elif self._waiting:
            self._pass_on(frame)
        else:
            self._noted = True

    def _give_back(self, number: int, frame: FrameType | None) -> None:
        """Be what we replaced: the handler of another signal raised where a call ended, and no call is at work."""
        before = self._before
        self.forget()
        if before is not None:
            before(number, frame)

    def _pass_on(self, frame: FrameType | None = None) -> None:
        self._noted = self._waiting = False  # if the handler raises, the wait is over
        if self._before is not None:
            self._before(_NUMBER, frame)
        self._waiting = True


def _in_client(frame: FrameType | None) -> bool:
    """Return whether a call of ours is at work in the main thread, which is at ``frame``."""
    if frame is None:
        return True
    while frame is not None and not frame.f_code.co_filename.startswith(_CLIENT):
        frame = frame.f_back
    return frame is not None


class _Allowed:
    """Lets the signal come, where the caller has nothing half done."""

    def __init__(self, owner: Interrupts) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        owner = self._owner
        if owner._depth and get_ident() == owner._main:
            owner._waiting = True
            if owner._noted:
                owner._pass_on()

    def __exit__(self, *_error: object) -> None:
        owner = self._owner
        if owner._depth and get_ident() == owner._main:
            owner._waiting = False


interrupts = Interrupts()
"""Those of this process."""

os.register_at_fork(after_in_child=interrupts.forget)
