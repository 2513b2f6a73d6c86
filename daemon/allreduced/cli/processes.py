"""Linux process housekeeping: orphans, death signals, and the end of a whole tree of processes.

A process that calls :func:`become_subreaper` inherits the orphans among its descendants, also those that left their
session with ``setsid``. So :func:`kill_descendants` finds everybody: nobody can leave the tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a job's front passes to the supervisor, and the supervisor to the ranks."""

_PF_EXITING = 0x4
"""The flag of the kernel for a process that is ending, set before anything of it is closed."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Process:
    """A line of the process table. ``zombie``: it has ended and waits for its parent to collect it."""

    pid: int
    parent: int
    zombie: bool


def become_subreaper() -> None:
    """Let orphans among the descendants of this process become its children instead of init's.

    :raises OSError: the kernel refuses (not Linux 3.4 or later).
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Make the kernel send SIGKILL to this process when its parent, ``parent``, dies. For use between fork and exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(128 + signal.SIGKILL)


def descendants(root: int) -> list[Process]:
    """Return all processes below ``root``, parents before children, zombies included."""
    by_parent: dict[int, list[Process]] = {}
    for process in _process_table():
        by_parent.setdefault(process.parent, []).append(process)
    found = list(by_parent.get(root, ()))
    for process in found:  # grows while it is walked: breadth first
        found.extend(by_parent.get(process.pid, ()))
    return found


def kill_descendants(spare: frozenset[int] = frozenset()) -> None:
    """Send SIGKILL to every descendant of this process, and return when none is left.

    The caller must be a subreaper. Children in ``spare`` and what is below them are left alone.
    """
    me = os.getpid()
    while True:
        below_spared = {process.pid for pid in spare for process in descendants(pid)} | spare
        targets = [process for process in descendants(me) if process.pid not in below_spared]
        if not targets:
            return
        for process in targets:
            if not process.zombie:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        # Their orphans become our children, so that the next round finds whatever was forked meanwhile.
        for process in targets:
            if process.parent == me:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, 0)


def await_end(pids: Iterable[int], seconds: float) -> None:
    """Wait until those of these children that are ending have ended, so long that the parent can collect them.

    What a process had open is closed a moment before its parent is told of its end, and whoever hears that first may
    be gone first. Which of them are ending is known at once; it is not waited for longer than ``seconds``.
    """
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        ending = set()
        for pid in pids:
            if _is_ending(pid):
                with contextlib.suppress(OSError):  # collected, no descriptor is left, or the kernel has none of these
                    descriptor = os.pidfd_open(pid)
                    stack.callback(os.close, descriptor)
                    poll.register(descriptor, select.POLLIN)
                    ending.add(descriptor)
        until = time.monotonic() + seconds
        while ending and (left := until - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                poll.unregister(descriptor)
                ending.discard(descriptor)


def _is_ending(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # collected meanwhile
        return False
    # After the name: state, parent, process group, session, terminal and its group, flags.
    return bool(int(text[text.rindex(b")") + 2 :].split(maxsplit=7)[6]) & _PF_EXITING)


def status_of(wait_status: int) -> int:
    """Return what a shell would show as ``$?`` for a status of ``waitpid``: 128 + n for death by signal n."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def describe_end(wait_status: int) -> str:
    """Return in words how a process ended."""
    code = os.waitstatus_to_exitcode(wait_status)
    return f"exited with status {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _process_table() -> list[Process]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_bytes()
            except OSError:  # it ended meanwhile
                continue
            # The name, in parentheses, may contain anything; the state and the parent follow the last one.
            state, parent = text[text.rindex(b")") + 2 :].split(maxsplit=2)[:2]
            found.append(Process(int(entry.name), int(parent), state in (b"Z", b"X")))
    return found
