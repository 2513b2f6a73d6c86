"""The command line: parse, dispatch, and turn errors into one line and an exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from allreduced.cli.arguments import Parser
from allreduced.cli.console import (
    MORE_FILES,
    OUT_OF_FILES,
    OutputLost,
    complain,
    drop_errors,
    drop_output,
    explain,
    open_missing,
)
from allreduced.cli.extras import remedy
from allreduced.core.errors import AllReducedError, UsageError
from allreduced.core.release import release

_EPILOG = """\
examples:
  allreduced demo                                            train a small network on three agents and six ranks
  allreduced run --nodes 2 --ranks-per-node 4 -- python train.py
  allreduced bench --ranks-per-node 4
  allreduced agent --config agent.toml
  allreduced status                                          what runs, and who is waited for
  allreduced doctor                                          what is misconfigured, and what mends it

Exit status: 0 for success, 2 for wrong usage or settings, 1 for other failures; `run` gives that of the failed rank.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return the exit status."""
    open_missing()
    try:
        return _main(argv)
    except OutputLost as error:
        complain(f"allreduced: error: {error}")
        drop_output()
        return 1
    except BrokenPipeError:  # such as: allreduced bench | head
        drop_output()
        return 141
    except KeyboardInterrupt:
        return 130
    finally:
        drop_errors()


def _main(argv: Sequence[str] | None) -> int:
    try:
        arguments = command_line().parse_args(argv)
    except SystemExit as end:  # argparse has said what it had to say
        return end.code if isinstance(end.code, int) else 2
    execute: Callable[[argparse.Namespace], int] = arguments.execute
    try:
        return execute(arguments)
    except UsageError as error:
        complain(explain(error))
        return 2
    except AllReducedError as error:
        complain(explain(error))
        return 1
    except ModuleNotFoundError as error:
        command = remedy(error)
        if command is None:
            raise
        complain(f"allreduced: error: this command needs the module {error.name}, which is not installed")
        complain(f"  hint: {command}")
        return 1
    except OSError as error:
        if error.errno not in OUT_OF_FILES:
            raise
        complain(f"allreduced: error: {error.strerror}\n  hint: {MORE_FILES}")
        return 1


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; man pages and completion are made from it."""
    # Not before: they load NumPy, for longer than it takes to press Ctrl-C, and here that ends without a traceback.
    from allreduced.cli import agent, bench, certs, completion, demo, doctor, run, status

    parser: argparse.ArgumentParser = Parser(
        prog="allreduced",
        description="The all-reduce daemon: one agent per node adds up tensors for the processes of a training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"allreduced {release()}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (agent, run, demo, bench, status, doctor, certs):
        command.add_parser(subparsers)
    completion.add_parser(subparsers, command_line)
    return parser


if __name__ == "__main__":
    sys.exit(main())
