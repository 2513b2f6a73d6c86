"""``allreduced doctor``: what is misconfigured, and the command that mends it."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allreduced.cli.arguments import Subparsers, seconds
from allreduced.cli.cluster_text import columns, printable
from allreduced.cli.console import complain, say
from allreduced.core.errors import AgentUnavailable

if TYPE_CHECKING:  # the agent's own modules are loaded by the command only
    from allreduced.daemon.doctor.cluster import Way
    from allreduced.daemon.doctor.examination import Examination, Told
    from allreduced.daemon.doctor.finding import Finding

SYSTEM_CONFIG = "/etc/allreduced/agent.toml"
"""Settings that are read where none are named and the file is there: those of the service."""

JSON_VERSION = 1
"""Grows when a key of ``--json`` changes its meaning or goes; new keys may come at any time."""

BOUND = 15.0
"""Seconds that all of it takes at most."""

MEASURED_BOUND = 75.0
"""The same where links are measured, which agents do one after the other."""

TO_TELL = 1.0
"""Seconds before the end at which the agent is waited for no more, so that what is known can be told."""

_MOST_NODES = 16
"""Agents up to which the table of who reaches whom is written in full."""

_MOST_WAYS = 64
"""Ways that fail that are listed where there are more agents than that."""

_EPILOG = """\
examples:
  allreduced doctor                                  of this node, by the service's settings if there are any
  allreduced doctor --config agent.toml
  allreduced doctor --bandwidth                      measure the links between all agents, too
  allreduced doctor --json | python -m json.tool

Nothing that runs is disturbed and nothing is changed. Where an agent runs here, it and the agents that it knows dial
each other; that, and --bandwidth, is for root and the user of the agents. A check that does not finish in time is told
as a problem.

Exit status: 0: no problem (warnings are none); 1: at least one; 2: wrong usage or settings.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``doctor`` to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="find what is misconfigured, with the command that mends it",
        description="Examine this node, its settings, and the ways between the agents.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help=f"settings of the agent (default: {SYSTEM_CONFIG}, if it is there)")
    add("--socket", metavar="S", help="socket of the agent: a path, or @name (default: that of the settings)")
    add("--local", action="store_true", help="do not ask other agents")
    add("--bandwidth", action="store_true", help="measure the links between all agents, one after the other")
    add(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help=f"seconds that all of it takes at most (default: {BOUND:g}, with --bandwidth {MEASURED_BOUND:g})",
    )
    add("--quiet", action="store_true", help="only warnings and problems")
    add("--json", action="store_true", help="write one JSON object, see docs/operations.md")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Examine, and write what was found; return the exit status."""
    from allreduced.daemon.descriptors import raise_descriptor_limit
    from allreduced.daemon.doctor.examination import examine
    from allreduced.daemon.doctor.finding import Level, worst
    from allreduced.daemon.settings_reader import load

    config = arguments.config or _system_config()
    settings = load(config, os.environ, {})
    raise_descriptor_limit()  # many agents may be listed
    socket = arguments.socket or os.environ.get("ALLREDUCED_SOCKET") or settings.agent.socket or _usual_socket()

    others, bandwidth = not arguments.local, arguments.bandwidth
    bound = bound_of(arguments.timeout, measured=bandwidth and others)
    until = time.monotonic() + max(bound - TO_TELL, bound / 2)

    def left() -> float:
        return max(until - time.monotonic(), 0.0)

    def ask() -> Told:
        return _ask(socket, others=others, bandwidth=bandwidth, left=left)

    found = examine(settings, socket, ask, bound=bound, service=config == SYSTEM_CONFIG)
    if arguments.json:
        say(json.dumps(as_json(found)))
    else:
        say("\n".join(lines(found, quiet=arguments.quiet)))
    return 1 if worst(found.findings) is Level.PROBLEM else 0


def bound_of(wished: float | None, *, measured: bool) -> float:
    """Return the seconds that all of it may take, where links are ``measured`` or not. Pure."""
    if wished is not None:
        return wished
    return MEASURED_BOUND if measured else BOUND


def _system_config() -> str | None:
    """Return the settings of the service; None where there are none, or this user may not read them, which is said."""
    try:
        with Path(SYSTEM_CONFIG).open("rb"):
            return SYSTEM_CONFIG
    except PermissionError:  # of the file, or a folder on the way
        complain(f"this user may not read {SYSTEM_CONFIG}: examined with the settings of the environment only")
        return None
    except OSError:
        return None


def _usual_socket() -> str:
    """Return where jobs look: the service's socket is found from a session with a runtime directory of its own."""
    from allreduced.client.environment import usual_places
    from allreduced.daemon.settings import default_socket

    there = (place for place in usual_places(os.environ) if os.access(place, os.F_OK, effective_ids=True))
    return next(there, "") or default_socket(os.environ)


def as_json(found: Examination) -> dict[str, object]:
    """Return the examination as what ``--json`` writes."""
    return {
        "version": JSON_VERSION,
        "findings": [
            {"subject": one.subject, "level": one.level.value, "message": one.message, "mend": one.mend}
            for one in found.findings
        ],
        "ways": [
            {
                "source": way.source,
                "target": way.target,
                "linked": way.linked,
                "outcome": way.reach.outcome if way.reach is not None else "",
                "address": way.reach.address if way.reach is not None else "",
                "seconds": way.reach.seconds if way.reach is not None else 0.0,
                "bandwidth": way.reach.bandwidth if way.reach is not None else 0,
            }
            for way in found.ways
        ],
    }


def lines(found: Examination, *, quiet: bool = False) -> list[str]:
    """Return what is written for people. Other agents chose some of the words: nothing that a terminal would obey."""
    told = [one for one in found.findings if not quiet or one.level.value in ("warning", "problem")]
    parts = [[line for one in told for line in _finding(one)]]
    if found.ways and not quiet:
        parts.append(_table(found.ways))
    counts = {level: sum(one.level.value == level for one in found.findings) for level in ("problem", "warning")}
    parts.append([", ".join(f"{number} {level}{'' if number == 1 else 's'}" for level, number in counts.items())])
    out: list[str] = []
    for part in parts:
        if part:
            out += ["", *part] if out else part
    return out


def _finding(one: Finding) -> list[str]:
    text = [f"{one.level.value:<8}{printable(one.subject)}: {printable(one.message)}"]
    return [*text, f"        mend: {printable(one.mend)}"] if one.mend else text


def _table(ways: Sequence[Way]) -> list[str]:
    """Return who reaches whom: a row for each agent that dials, a column for each that is dialled."""
    sources = sorted({way.source for way in ways})
    targets = sorted({way.target for way in ways} | set(sources))
    if len(targets) > _MOST_NODES:
        bad = [way for way in ways if not way.linked or (way.reach is not None and way.reach.outcome != "reached")]
        shown = [f"  {printable(f'{way.source} -> {way.target}')}: {_cell(way)}" for way in bad[:_MOST_WAYS]]
        more = [f"  … and {len(bad) - _MOST_WAYS} more"] if len(bad) > _MOST_WAYS else []
        return [f"{len(targets)} agents; ways that fail: {len(bad)}", *shown, *more]
    cells = {(way.source, way.target): _cell(way) for way in ways}
    rows = [[printable(source), *(cells.get((source, target), "-") for target in targets)] for source in sources]
    return columns(["reaches", *map(printable, targets)], rows, indent="")


def _cell(way: Way) -> str:
    reach = way.reach
    if reach is None:
        return "linked" if way.linked else "no link"
    text = f"{reach.seconds * 1e3:.2f} ms" if reach.outcome == "reached" else printable(reach.outcome)
    if reach.bandwidth:
        text += f" {reach.bandwidth / 1e9:.2f} GB/s"
    return text if way.linked else f"{text}, no link"


def _ask(socket: str, *, others: bool, bandwidth: bool, left: Callable[[], float]) -> Told:
    """Ask the agent, and through it the others. ``left``: seconds that are left for it.

    :raises AllReducedError: it does not answer.
    """
    from allreduced.client.inquiry import ask_status
    from allreduced.core.addresses import parse_socket
    from allreduced.daemon.doctor.examination import Told
    from allreduced.daemon.doctor.finding import problem
    from allreduced.daemon.status import MEASURE, PROBE

    address = parse_socket(socket)
    # One that hangs or is stopped says nothing at all; the other half of the time is for asking others.
    alone = ask_status(address, path=socket, others=False, timeout=left() / 2)
    if not others:
        return Told(alone.reports, alone.unanswered)
    probe = MEASURE if bandwidth else PROBE
    try:
        told = ask_status(address, path=socket, others=True, timeout=left(), probe=probe)
    except AgentUnavailable as error:
        message = f"asking all agents to dial each other did not finish in time: {error.message}"
        mend = "allreduced doctor --timeout waits longer; allreduced status tells which agents do not answer"
        return Told(alone.reports, alone.unanswered, (problem("agents", message, mend),))
    return Told(told.reports, told.unanswered)
