"""``allreduced bench``: an nccl-tests-shaped table of times and bandwidths."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING

from allreduced.cli.arguments import Subparsers, add_job_shape, count, factor, nbytes, positive_int
from allreduced.cli.console import say
from allreduced.cli.table import Column, Table
from allreduced.core.dtypes import DType, parse_dtype
from allreduced.core.errors import ConfigError, InvalidArgument, LimitExceeded
from allreduced.core.limits import MAX_COUNT
from allreduced.core.reductions import Reduction, parse_reduction

if TYPE_CHECKING:
    from allreduced.cli.measure import Measurement, Sweep
    from allreduced.client import Communicator

_COLLECTIVES = ("all_reduce", "broadcast")
_DTYPES = tuple(dtype.label for dtype in DType)
_REDUCTIONS = tuple(reduction.label for reduction in Reduction if reduction is not Reduction.COPY)

_EPILOG = """\
examples:
  allreduced bench --ranks-per-node 4                        one private agent, four ranks
  allreduced bench --nodes 2 -b 1K -e 256M --dtype float64 --op mean
  torchrun --nproc-per-node 4 -m allreduced.cli.main bench   as the ranks of a job that was launched

size is that of one rank's tensor. time is the mean of a call, over --iters calls and all ranks. algbw = size / time.
busbw = algbw x 2(n-1)/n for all_reduce over n ranks (x 1 for broadcast): the bandwidth that the slowest connection must
have had. #wrong counts the elements that differ from the exact result, on all ranks. These are the definitions of
nccl-tests. GB/s are 10^9 bytes per second.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``bench`` to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="measure a collective over a range of sizes",
        description="Measure a collective over a range of sizes, on private agents of this machine or in a job.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_job_shape(parser, nodes=1, ranks_per_node=4)
    add("-b", "--begin", type=nbytes, default="8", metavar="SIZE", help="first size in bytes (default: %(default)s)")
    add("-e", "--end", type=nbytes, default="64M", metavar="SIZE", help="last size in bytes (default: %(default)s)")
    add("-f", "--factor", type=factor, default=2, metavar="F", help="from one size to the next (default: %(default)s)")
    add("--dtype", choices=_DTYPES, default="float32", help="default: %(default)s")
    add("--op", choices=_REDUCTIONS, default="sum", help="default: %(default)s")
    add("--collective", choices=_COLLECTIVES, default="all_reduce", help="default: %(default)s")
    add("--algorithm", default="", metavar="NAME", help="as in docs/algorithms.md (default: what the agents choose)")
    add(
        "--iters", type=positive_int, default=20, metavar="N", help="measured calls of each size (default: %(default)s)"
    )
    add("--warmup", type=count, default=5, metavar="N", help="calls before them (default: %(default)s)")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--view", action="store_true", help="tensors in shared memory: nothing is copied by the ranks")
    memory.add_argument(
        "--copy", dest="view", action="store_false", help="plain arrays, copied in and out (this is the default)"
    )
    add(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with the exact result (default: on); a wrong element makes the exit status 1",
    )
    add("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Measure as a rank where a launcher made this process one, else start a job that does."""
    sweep = sweep_of(arguments)
    if _launched():
        return _as_rank(sweep, as_json=arguments.json)
    from allreduced.cli.extras import require
    from allreduced.cli.front import run_job
    from allreduced.cli.job import Job, python_module

    require("msgspec")
    command = [
        *python_module("allreduced.cli.main"),
        "bench",
        *options_of(sweep),
        *(["--json"] if arguments.json else []),
    ]
    return run_job(Job(tuple(command), nodes=arguments.nodes, ranks_per_node=arguments.ranks_per_node, prefix=False))


def sweep_of(arguments: argparse.Namespace) -> Sweep:
    """Return what the command line asks for.

    :raises ConfigError: that cannot be measured.
    """
    from allreduced.cli.measure import Sweep

    sweep = Sweep(
        collective=arguments.collective,
        dtype=arguments.dtype,
        op=arguments.op,
        begin=arguments.begin,
        end=arguments.end,
        factor=arguments.factor,
        warmup=arguments.warmup,
        iterations=arguments.iters,
        view=arguments.view,
        check=arguments.check,
        algorithm=arguments.algorithm,
    )
    if sweep.end > MAX_COUNT:
        raise ConfigError(f"the last size, {sweep.end} bytes, is more than any tensor has")
    if sweep.begin > sweep.end:
        raise ConfigError(f"the first size, {sweep.begin} bytes, is larger than the last, {sweep.end} bytes")
    try:
        parse_reduction(sweep.op, parse_dtype(sweep.dtype))
    except InvalidArgument as error:
        raise ConfigError(error.message, hint="choose another --dtype or --op") from None
    if sweep.dtype == DType.BFLOAT16.label:
        try:
            import_module("ml_dtypes")  # teaches NumPy this type
        except ModuleNotFoundError:
            raise ConfigError("NumPy has no bfloat16 here", hint="pip install ml_dtypes") from None
    return sweep


def options_of(sweep: Sweep) -> list[str]:
    """Return the options that give ``sweep`` again."""
    return [
        f"--collective={sweep.collective}",
        f"--dtype={sweep.dtype}",
        f"--op={sweep.op}",
        f"--begin={sweep.begin}",
        f"--end={sweep.end}",
        f"--factor={sweep.factor}",
        f"--warmup={sweep.warmup}",
        f"--iters={sweep.iterations}",
        "--view" if sweep.view else "--copy",
        "--check" if sweep.check else "--no-check",
        *([f"--algorithm={sweep.algorithm}"] if sweep.algorithm else []),
    ]


def _launched() -> bool:
    from allreduced.client.environment import read_launch

    return read_launch(os.environ).launcher != "none"


def _as_rank(sweep: Sweep, *, as_json: bool) -> int:
    from allreduced.client import connect

    wrong = 0
    rows: list[Measurement] = []
    with connect() as comm:
        place = _placement(comm)
        table = _table()
        if comm.rank == 0 and not as_json:
            say("# allreduced bench: " + ", ".join(f"{key} {value}" for key, value in place.items()))
            say(f"# {sweep.collective}, {sweep.warmup} + {sweep.iterations} calls, {'view' if sweep.view else 'copy'}")
            say(table.heading())
        for row in _measured(comm, sweep):
            rows.append(row)
            wrong += row.wrong or 0
            if comm.rank == 0 and not as_json:
                say(table.row(_cells(row, sweep)))
        comm.barrier()
    if comm.rank == 0:
        mean = sum(row.busbw for row in rows) / len(rows) if rows else 0.0
        if as_json:
            say(json.dumps({**place, **asdict(sweep), "rows": [asdict(row) for row in rows], "mean_busbw": mean}))
        else:
            say(f"# wrong elements: {wrong if sweep.check else 'not checked'}")
            say(f"# mean bus bandwidth: {mean / 1e9:.3f} GB/s")
    return 1 if wrong else 0


def _measured(comm: Communicator, sweep: Sweep) -> Iterator[Measurement]:
    from allreduced.cli.measure import measure

    try:
        yield from measure(comm, sweep)
    except MemoryError as error:
        raise LimitExceeded(f"rank {comm.rank} has no memory for it: {error}", hint="lower --end") from None


def _placement(comm: Communicator) -> dict[str, object]:
    return {
        "nodes": len(comm.nodes),
        "ranks": comm.size,
        "ranks_per_node": comm.local_size,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
    }


def _table() -> Table:
    return Table(
        [
            Column("size", "(B)", 12),
            Column("count", "(elements)", 12),
            Column("type", "", 11),
            Column("redop", "", 6),
            Column("time", "(us)", 12),
            Column("algbw", "(GB/s)", 9),
            Column("busbw", "(GB/s)", 9),
            Column("#wrong", "", 8),
        ]
    )


def _cells(row: Measurement, sweep: Sweep) -> list[str]:
    return [
        str(row.nbytes),
        str(row.count),
        sweep.dtype,
        sweep.op if sweep.collective == "all_reduce" else "none",
        f"{row.seconds * 1e6:.1f}",
        f"{row.algbw / 1e9:.3f}",
        f"{row.busbw / 1e9:.3f}",
        "N/A" if row.wrong is None else str(row.wrong),
    ]
