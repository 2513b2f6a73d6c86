"""How the command line writes to people."""

from __future__ import annotations

import sys

from allreduced.core.errors import AllReducedError


def say(text: str = "") -> None:
    """Write a line to standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """Write a line to standard error, at once."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def explain(error: AllReducedError) -> str:
    """Return the error as the one line that users see, with a second one for the hint where there is one."""
    text = f"allreduced: error: {error.message}"
    return f"{text}\n  hint: {error.hint}" if error.hint else text
