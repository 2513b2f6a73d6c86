"""``allreduced run``: agents and ranks of a job on this machine."""

from __future__ import annotations

import argparse

from allreduced.cli.arguments import Subparsers, add_job_shape, seconds
from allreduced.core.errors import ConfigError

_EPILOG = """\
examples:
  allreduced run --ranks-per-node 4 -- python train.py
  allreduced run --nodes 3 --ranks-per-node 2 --env OMP_NUM_THREADS=1 -- python train.py --epochs 5

Each rank finds itself in ALLREDUCED_JOB, _RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, _NODE, _NODES, _SOCKET, and in the
names of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT. PYTHONUNBUFFERED=1 and OMP_NUM_THREADS (cores divided by ranks, at least 1) are set where they are not.
Ranks read nothing from standard input.

The first rank that fails stops all others, and its status is the exit status (128 + n for death by signal n). SIGINT,
SIGTERM and SIGHUP are passed to the ranks; a second SIGINT kills them. No process of the job is left at the end, also
when this command is killed.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``run`` to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="run a command as the ranks of a job on this machine",
        usage="%(prog)s [options] -- CMD [ARG ...]",
        description="Start private agents on this machine, and a command as the ranks of a job on them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job_shape(parser, nodes=1, ranks_per_node=1)
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable for all ranks and agents; may be repeated",
    )
    parser.add_argument(
        "--agent-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="pass ARG to every agent, such as --agent-arg=--config=agent.toml; may be repeated",
    )
    parser.add_argument("--no-prefix", action="store_true", help="do not put [rank] before each line of output")
    parser.add_argument(
        "--grace",
        type=seconds,
        default=5.0,
        metavar="SECONDS",
        help="time between SIGTERM and SIGKILL when the job is stopped (default: %(default)g s)",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="CMD", help="the command of each rank, and its arguments"
    )
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Run the job; return its exit status."""
    from allreduced.cli.extras import require
    from allreduced.cli.front import run_job
    from allreduced.cli.job import Job

    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ConfigError("no command to run", hint="put it after --, such as: allreduced run -- python train.py")
    require("msgspec")
    return run_job(
        Job(
            command=tuple(command),
            nodes=arguments.nodes,
            ranks_per_node=arguments.ranks_per_node,
            agent_arguments=tuple(arguments.agent_arg),
            environment=_environment(arguments.env),
            prefix=not arguments.no_prefix,
            grace=arguments.grace,
        )
    )


def _environment(settings: list[str]) -> dict[str, str]:
    environment = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise ConfigError(f"--env {setting!r} is not of the form NAME=VALUE")
        environment[name] = value
    return environment
