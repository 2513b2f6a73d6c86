"""``allreduced agent``: run this node's agent in the foreground."""

from __future__ import annotations

import argparse

from allreduced.cli.arguments import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("agent", help="run this node's agent")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    return 0
