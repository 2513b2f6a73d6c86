"""``allreduced demo``: the training of ``demo_training`` on agents and ranks of this machine, with a live table."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Protocol

from allreduced.cli.arguments import Subparsers, add_job_shape, positive_int
from allreduced.cli.console import is_terminal, say

if TYPE_CHECKING:
    from allreduced.cli.demo_training import Check, Epoch

_EPILOG = """\
The training program is the module allreduced.cli.demo_training: a file to copy from. At the end three things are
checked: the parameters are the same bits on all ranks; they equal those of a single process over the same batches
within 1e-5; and at least 95 % of the held-out digits are recognized. A check that fails makes the exit status 1.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``demo`` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small network on several agents of this machine",
        description="Train a small network with NumPy on scikit-learn's digits, data-parallel over private agents.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job_shape(parser, nodes=3, ranks_per_node=2)
    parser.add_argument(
        "--epochs", type=positive_int, default=30, metavar="E", help="passes over the data (default: %(default)s)"
    )
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0 where all checks passed."""
    from allreduced.cli.demo_training import Check, Epoch
    from allreduced.cli.extras import require
    from allreduced.cli.front import run_job
    from allreduced.cli.job import Job, python_module

    require("sklearn", "rich", "msgspec")  # the extra of the first brings them all
    job = Job(
        command=(*python_module("allreduced.cli.demo_training"), f"--epochs={arguments.epochs}"),
        nodes=arguments.nodes,
        ranks_per_node=arguments.ranks_per_node,
        prefix=False,
    )
    say(f"training on {job.nodes} agents with {job.ranks_per_node} ranks each: {job.size} ranks, on this machine")
    display: Display = LiveTable() if is_terminal() else PlainLines()
    checks: list[Check] = []

    def on_line(line: bytes) -> None:
        for kind, facts in json.loads(line).items():
            if kind == "epoch":
                display.epoch(Epoch(**facts))
            else:
                checks.append(Check(**facts))
                display.check(checks[-1])

    begin = time.monotonic()
    try:
        status = run_job(job, on_line)
    finally:
        display.close()
    if status == 0:
        say(f"all {len(checks)} checks passed, in {time.monotonic() - begin:.1f} s")
    return status


class Display(Protocol):
    """Shows how the training goes."""

    def epoch(self, epoch: Epoch) -> None:
        """Show an epoch."""

    def check(self, check: Check) -> None:
        """Show a check."""

    def close(self) -> None:
        """Leave the terminal as it should be."""


class PlainLines:
    """A line for each epoch: for files, pipes and terminals without rich."""

    def epoch(self, epoch: Epoch) -> None:
        """Write a line."""
        from allreduced.cli.demo_training import epoch_text

        say(epoch_text(epoch))

    def check(self, check: Check) -> None:
        """Write a line."""
        from allreduced.cli.demo_training import check_text

        say(check_text(check))

    def close(self) -> None:
        """Nothing is held."""


class LiveTable:
    """A table that is redrawn in place, with the last epochs."""

    ROWS = 12

    def __init__(self) -> None:
        from rich.live import Live

        self._epochs: list[Epoch] = []
        self._live: Live | None = Live(refresh_per_second=10, auto_refresh=False)
        self._live.start()

    def epoch(self, epoch: Epoch) -> None:
        """Add a row."""
        from rich.table import Table

        self._epochs = [*self._epochs, epoch][-self.ROWS :]
        table = Table()
        for heading in ("epoch", "loss", "accuracy", "steps/s", "MB reduced", "algbw (MB/s)"):
            table.add_column(heading, justify="right")
        for row in self._epochs:
            table.add_row(
                f"{row.epoch}/{row.epochs}",
                f"{row.loss:.4f}",
                f"{row.accuracy:.4f}",
                f"{row.steps_per_second:.1f}",
                f"{row.reduced / 1e6:.2f}",
                f"{row.algbw / 1e6:.2f}",
            )
        if self._live is not None:
            self._live.update(table, refresh=True)

    def check(self, check: Check) -> None:
        """Write a line below the table."""
        from rich.console import Console
        from rich.text import Text

        self.close()
        style = "green" if check.passed else "bold red"
        Console().print(Text("ok    " if check.passed else "FAIL  ", style=style), Text(check.text), sep="")

    def close(self) -> None:
        """Leave the table where it is."""
        if self._live is not None:
            self._live.stop()
            self._live = None
