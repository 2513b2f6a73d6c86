"""``allreduced status``: what runs, and who is waited for."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time

from allreduced.cli.agents_here import agents_here
from allreduced.cli.arguments import Subparsers, seconds
from allreduced.cli.cluster_merge import put_together
from allreduced.cli.cluster_text import lines
from allreduced.cli.cluster_view import ClusterView
from allreduced.cli.console import say
from allreduced.client.endpoint import QueueFull
from allreduced.client.environment import usual_places
from allreduced.client.inquiry import ClusterStatus, ask_status
from allreduced.core.addresses import parse_socket
from allreduced.core.errors import AgentUnavailable, AllReducedError, ConfigError

JSON_VERSION = 1
"""Grows when a key of ``--json`` changes its meaning or goes; new keys may come at any time."""

_EPILOG = """\
examples:
  allreduced status                        of the agents that this node's agent knows
  allreduced status --socket @allreduced-run-0123456789ab-node0
  allreduced status --json | python -m json.tool

The agent is looked for at --socket, $ALLREDUCED_SOCKET, $XDG_RUNTIME_DIR/allreduced/agent.sock and
/run/allreduced/agent.sock; where none answers, among the private agents of this machine. It asks the others. Nothing
that runs is disturbed. Root and the user of the agents see all groups, other users the details of their own.

Exit status: 0, also where some agents did not answer; 1 where none did.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``status`` to the command line."""
    parser = subparsers.add_parser(
        "status",
        help="show what runs, and who is waited for",
        description="Show agents, groups, ranks, and operations in flight: what each waits for, and since when.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--socket", metavar="S", help="socket of the agent to ask: a path, or @name")
    add("--local", action="store_true", help="do not ask other agents")
    add("--json", action="store_true", help="write one JSON object, see docs/guide.md")
    add(
        "--timeout",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="wait no longer than this for the agent (default: %(default)g)",
    )
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Ask, and write what was told; return the exit status."""
    told = _ask(arguments.socket, others=not arguments.local, timeout=arguments.timeout)
    view = put_together(told.reports, told.unanswered)
    if arguments.json:
        say(json.dumps(as_json(view)))
    else:
        say("\n".join(lines(view)))
    return 0


def as_json(view: ClusterView) -> dict[str, object]:
    """Return the view as what ``--json`` writes."""
    return {"version": JSON_VERSION, **dataclasses.asdict(view)}


def _ask(socket: str | None, *, others: bool, timeout: float) -> ClusterStatus:
    until = time.monotonic() + timeout
    named, source = socket, "--socket"
    if named is None and os.environ.get("ALLREDUCED_SOCKET"):
        named, source = os.environ["ALLREDUCED_SOCKET"], "ALLREDUCED_SOCKET"
    if named is not None:
        return ask_status(parse_socket(named, path=source), path=source, others=others, timeout=timeout)
    tried: list[str] = []
    for place in usual_places(os.environ):
        try:
            left = max(until - time.monotonic(), 0.0)
            return ask_status(parse_socket(place, path=place), path=place, others=others, timeout=left)
        except QueueFull:
            raise  # an agent is there
        except (AgentUnavailable, ConfigError) as error:
            tried.append(error.message)
    sockets = _one_of_each(agents_here(), until)
    if len(sockets) == 1:
        left = max(until - time.monotonic(), 0.0)
        return ask_status(parse_socket(sockets[0]), path=sockets[0], others=others, timeout=left)
    if sockets:
        raise ConfigError(
            f"{len(sockets)} jobs have private agents on this machine, and no agent runs at the usual places",
            path="--socket",
            hint="choose one: " + ", or ".join(f"--socket {name}" for name in sockets[:8]),
        )
    raise AgentUnavailable(
        f"no agent runs on this node: {'; '.join(tried)}", hint="start one, or name its socket with --socket"
    )


def _one_of_each(sockets: list[str], until: float) -> list[str]:
    """Return the socket of one agent of each cluster, of those that answer this user: they know each other."""
    chosen: list[str] = []
    known: set[int] = set()
    for position, name in enumerate(sockets):
        try:
            left = max(until - time.monotonic(), 0.0) / (len(sockets) - position)  # one that hangs costs its share only
            told = ask_status(parse_socket(name), path=name, others=False, timeout=left)
        except AllReducedError:
            continue  # another user's, or it ends just now, or hangs
        incarnations = {report.incarnation for report in told.reports}
        if not incarnations & known:
            chosen.append(name)
        known |= incarnations | {peer.incarnation for report in told.reports for peer in report.peers}
    return chosen
