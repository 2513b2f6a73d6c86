"""Types of command line arguments, with messages that say what is allowed."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TypeAlias

from allreduced.cli.console import complain, say

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where subcommands add their parsers."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Parser(argparse.ArgumentParser):
    """Help is output and errors are words, as console has it; argparse says nothing where help cannot be written."""

    def _print_message(self, message: str, file: object = None) -> None:
        (complain if file is sys.stderr else say)(message.removesuffix("\n"))


def add_job_shape(parser: argparse.ArgumentParser, *, nodes: int, ranks_per_node: int) -> None:
    """Add the options that say how many agents and ranks a job on this machine has, with these defaults."""
    add = parser.add_argument
    add("--nodes", type=positive_int, default=nodes, metavar="H", help="agents to start (default: %(default)s)")
    add(
        "--ranks-per-node",
        type=positive_int,
        default=ranks_per_node,
        metavar="N",
        help="ranks per agent (default: %(default)s)",
    )


def positive_int(text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def count(text: str) -> int:
    """Return a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def factor(text: str) -> int:
    """Return a whole number of at least 2."""
    value = positive_int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 2")
    return value


def seconds(text: str) -> float:
    """Return a finite time of at least 0 seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")
    return value


def nbytes(text: str) -> int:
    """Return a size in bytes; K, M and G are powers of 1024, such as ``64M``."""
    number = text.upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in ("K", "M", "G") else ""
    digits = number.removesuffix(unit) if unit else number
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, or 8K, 64M, 1G")
    return int(digits) * _UNITS[unit]
