"""How sessions end that nobody closed: in order where the process just ends, silently in forked children."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import Protocol


class Leaver(Protocol):
    """A session that can say goodbye by itself."""

    def leave_at_exit(self) -> None:
        """Leave without waiting."""

    def abandon(self) -> None:
        """Close the descriptor in a forked child."""


_open_sessions: weakref.WeakSet[Leaver] = weakref.WeakSet()


def leave_when_forgotten(session: Leaver) -> None:
    """Make the session leave its group when this process ends, and let go of it in forked children."""
    _open_sessions.add(session)
    _leave_at_exit_of_multiprocessing()


def forget(session: Leaver) -> None:
    """Take note that the session has ended."""
    _open_sessions.discard(session)


def leave_all() -> None:
    """Leave all groups: the other ranks must see an orderly end, not a lost rank, where a script just ends."""
    for session in list(_open_sessions):
        session.leave_at_exit()


def _abandon_all() -> None:
    for session in list(_open_sessions):
        session.abandon()
    _open_sessions.clear()


def _leave_at_exit_of_multiprocessing() -> None:
    """Children of multiprocessing end without running atexit functions; they have their own list."""
    global _registered_pid
    util = sys.modules.get("multiprocessing.util")
    finalize = getattr(util, "Finalize", None)
    if callable(finalize) and _registered_pid != os.getpid():
        _registered_pid = os.getpid()
        finalize(None, leave_all, exitpriority=10)


_registered_pid = 0
atexit.register(leave_all)
os.register_at_fork(after_in_child=_abandon_all)
