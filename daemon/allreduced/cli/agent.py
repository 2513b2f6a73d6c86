"""``allreduced agent``: run this node's agent in the foreground."""

from __future__ import annotations

import argparse
import json
import logging
import os
from dataclasses import dataclass

from allreduced.cli.arguments import Subparsers, count
from allreduced.cli.console import OutputLost, complain, say
from allreduced.core.errors import AgentUnavailable, AllReducedError, InternalError, to_wire

logger = logging.getLogger("allreduced.agent")

_EPILOG = """\
examples:
  allreduced agent                                     with the usual socket, without peers
  allreduced agent --config agent.toml                 with all settings from a file
  allreduced agent --config agent.toml --check         show the effective settings and stop
  allreduced agent --listen tcp://0.0.0.0:4123 --peer b=tcp://10.0.0.2:4123

Options beat environment variables (ALLREDUCED_<SECTION>_<KEY>), and these beat the file. SIGTERM and SIGINT let running
operations end, then stop the agent with status 0. SIGHUP reads the file again (see docs/operations.md); in a terminal
and without --config it stops the agent, too.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``agent`` to the command line."""
    parser = subparsers.add_parser(
        "agent",
        help="run this node's agent",
        description="Run this node's agent in the foreground.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="settings, in TOML")
    add(
        "--check",
        action="store_true",
        help="find out whether an agent would start here, print the effective settings as TOML, secrets masked, and the"
        " times that follow from them, and stop",
    )
    add("--quiet", action="store_true", help="with --check: print nothing where all is well")
    add("--node", metavar="NAME", help="unique name of this node (default: the host name)")
    add(
        "--socket",
        metavar="S",
        help="socket for the clients: a path, or @name in Linux's abstract namespace"
        " (default: $XDG_RUNTIME_DIR/allreduced/agent.sock, else /run/allreduced/agent.sock)",
    )
    add("--listen", metavar="A", help="address for other agents, such as tcp://0.0.0.0:4123; port 0: any free one")
    add(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=ADDR",
        help="another agent: its node name and address; may be repeated",
    )
    add("--join", metavar="HOST:PORT", help="meet the other private agents of the job at this address")
    add("--private", action="store_true", help="serve one job, and stop when its last rank on this node is gone")
    add(
        "--ready-fd",
        type=count,
        metavar="N",
        help="when ready, or when starting failed, write a line of JSON to this inherited descriptor",
    )
    parser.set_defaults(execute=execute)


@dataclass(slots=True)
class _Stage:
    """How far the agent has come. ``ready``: it was ready to serve."""

    ready: bool = False


def execute(arguments: argparse.Namespace) -> int:
    """Run the agent until it is told to stop; return its exit status."""
    stage = _Stage()
    try:
        if not arguments.check:
            from allreduced.daemon.logs import take_stderr

            take_stderr()
        return _execute(arguments, stage)
    except AllReducedError as error:
        _announce(arguments, error, stage)
        raise
    except ModuleNotFoundError as error:
        hint = "pip install 'allreduced[agent]'"
        _announce(arguments, AgentUnavailable(f"the agent needs the module {error.name}", hint=hint), stage)
        raise
    except Exception as error:  # nobody thought of it; who waits for the agent must hear of it all the same
        if arguments.check and isinstance(error, OutputLost | BrokenPipeError):
            raise  # what it wrote is read by nobody, as with every command
        if stage.ready:
            logger.exception("event=ended error=%r", repr(error))
        else:
            logger.exception("event=not_started error=%r", repr(error))
        unforeseen = InternalError(
            f"the agent {'ended' if stage.ready else 'could not be started'}: {error!r}",
            hint="the traceback is above; where memory and descriptors are not short, please report it",
        )
        _announce(arguments, unforeseen, stage, (error.errno or 0) if isinstance(error, OSError) else 0)
        raise unforeseen from error


def _execute(arguments: argparse.Namespace, stage: _Stage) -> int:
    from allreduced.daemon.settings_reader import load

    overrides = _overrides(arguments)
    settings = load(arguments.config, os.environ, overrides)
    if arguments.check:
        from allreduced.daemon.start_check import check_start, node_of

        check_start(node_of(settings, private=arguments.private), settings)
    if arguments.check and arguments.quiet:
        return 0
    if arguments.check:
        say(settings.describe())
        say("# What follows from failure.failure_timeout:")
        for line in (*settings.timing.describe(), *settings.rdma_patience.describe()):
            say(f"# {line}")
        return 0
    from allreduced.daemon.agent import AgentOptions, run_agent

    # Who started it by hand wants to know; who reads JSON has event=ready.
    tells = arguments.ready_fd is None and settings.agent.log_format == "text"

    def on_ready(socket: str, listen: str) -> None:
        stage.ready = True
        if tells:
            _tell(socket, listen)

    return run_agent(
        settings,
        AgentOptions(
            private=arguments.private,
            join=arguments.join,
            ready_fd=arguments.ready_fd,
            reload=(lambda: load(arguments.config, os.environ, overrides, again=True)) if arguments.config else None,
            on_ready=on_ready,
        ),
    )


def _tell(socket: str, listen: str) -> None:
    others = f"other agents at {listen}" if listen else "no other agents"
    complain(f"allreduced: the agent is ready: clients at {socket}, {others}")


def _overrides(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the settings that the command line gives."""
    given = {
        "agent.node": arguments.node,
        "agent.socket": arguments.socket,
        "peers.listen": arguments.listen,
        "peers.static": ",".join(arguments.peer) or None,
    }
    return {key: value for key, value in given.items() if value is not None}


def _announce(arguments: argparse.Namespace, error: AllReducedError, stage: _Stage, errno: int = 0) -> None:
    """Tell the service manager, and whoever waits for the ready line, why the agent does not run."""
    from allreduced.daemon.service_manager import ServiceManager

    if not arguments.check:
        ServiceManager(os.environ).failed(f"{'ended' if stage.ready else 'not started'}: {error}", errno)
    if arguments.ready_fd is None or stage.ready:
        return
    try:
        os.write(arguments.ready_fd, json.dumps({"error": to_wire(error)}).encode() + b"\n")
        os.close(arguments.ready_fd)
    except OSError:  # the agent itself has said it already, and closed the descriptor; or nobody waits any more
        return
