"""``allreduced completion``: completion of this command line, for a shell to read."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from allreduced.cli.arguments import Subparsers
from allreduced.cli.console import say

SHELLS = ("bash", "zsh")

_EPILOG = """\
examples:
  eval "$(allreduced completion bash)"                       in ~/.bashrc, for one user
  allreduced completion bash > /etc/bash_completion.d/allreduced
  allreduced completion zsh > /usr/local/share/zsh/site-functions/_allreduced
"""


def add_parser(subparsers: Subparsers, whole: Callable[[], argparse.ArgumentParser]) -> None:
    """Add ``completion`` to the command line. ``whole``: makes the parser of all of it."""
    parser = subparsers.add_parser(
        "completion",
        help="write completion of this command for a shell",
        description="Write completion of this command line for a shell to standard output.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, help="bash or zsh")
    parser.set_defaults(execute=lambda arguments: execute(arguments, whole()))


def execute(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Write what the shell reads."""
    import shtab

    say(shtab.complete(parser, shell=arguments.shell))
    return 0
