"""How the command line writes to people, also where nobody reads it.

What a command exists to write goes to standard output, and a failure there is an error. Words about what happens go to
standard error, and nothing depends on them: where they cannot be written they are lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys

from allreduced.core.errors import AllReducedError

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
"""Numbers of the errors that tell that no further file or socket can be opened."""

MORE_FILES = "raise the limit on open files (ulimit -n)"
"""What helps then."""


class OutputLost(Exception):
    """Standard output takes nothing: it is closed, or the disk is full."""


def open_missing() -> None:
    """Open /dev/null in the place of each standard descriptor that is closed.

    Else the next file or socket that is opened gets the number, and with it all that is meant for standard error.
    ``sys.stdout`` stays None, so that :func:`say` knows.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free, which is this
    if sys.stderr is None:
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115 # for the whole life


def say(text: str = "") -> None:
    """Write a line to standard output, at once. What its encoding lacks is written as an escape.

    :raises OutputLost: it cannot be written.
    :raises BrokenPipeError: nobody reads any more.
    """
    if sys.stdout is None:
        raise OutputLost("standard output is closed")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLost(f"standard output cannot be written: {error.strerror or error}") from error


def is_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def complain(text: str) -> None:
    """Write a line to standard error, at once. It is lost where that takes nothing."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


def drop_output() -> None:
    """Forget what standard output did not take, so that the interpreter has nothing to complain of at its end."""
    if sys.stdout is not None:
        _point_nowhere(sys.stdout.fileno())


def drop_errors() -> None:
    """Forget what standard error does not take, which else changes the exit status."""
    if sys.stderr is not None:
        try:
            sys.stderr.flush()
        except OSError:
            _point_nowhere(sys.stderr.fileno())


def _point_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def explain(error: AllReducedError) -> str:
    """Return the error as the one line that users see, with a second one for the hint where there is one."""
    text = f"allreduced: error: {error.message}"
    return f"{text}\n  hint: {error.hint}" if error.hint else text
