"""``python -m tests.rdma.guest``: prepares the guest, and runs commands in it."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.rdma.guest.machine import Command, run
from tests.rdma.guest.prepare import prepared
from tests.rdma.guest.unavailable import Unavailable

ROOT: Final = Path(__file__).resolve().parents[3]


def main() -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.rdma.guest", description=__doc__)
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(os.environ.get("RDMA_GUEST_CACHE", ROOT / "build" / "rdma-guest")),
        help="where kernel and initramfs are kept (RDMA_GUEST_CACHE; default: build/rdma-guest)",
    )
    parser.add_argument(
        "--require",
        action="store_true",
        default=bool(os.environ.get("RDMA_GUEST_REQUIRE")),
        help="fail where there can be no guest, instead of skipping (RDMA_GUEST_REQUIRE=1)",
    )
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("prepare", help="make what the guest needs, if it is not there")
    running = what.add_parser("run", help="boot, run a command as root, return its status (124: it took too long)")
    running.add_argument("--seconds", type=float, default=300.0, help="limit of the command; default: 300")
    running.add_argument("--nodes", type=int, default=4, help="addresses of the RDMA device; 0: no device")
    running.add_argument("--out", type=Path, help="where the files come that the command writes into $GUEST_OUT")
    running.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the command")
    running.add_argument("command", nargs="+", help="the command, after --")
    chosen = parser.parse_args()
    try:
        began = time.monotonic()
        machine = prepared(chosen.cache)
        _say(f"the guest is prepared ({time.monotonic() - began:.0f} s): Linux {machine.kernel.version}")
        if chosen.what == "prepare":
            return 0
        environment = dict(word.split("=", 1) for word in chosen.env)
        command = Command(chosen.command, Path.cwd(), chosen.seconds, environment, chosen.nodes)
        with tempfile.TemporaryDirectory(prefix="rdma-guest-") as scratch:
            out = chosen.out or Path(scratch)
            out.mkdir(parents=True, exist_ok=True)
            began = time.monotonic()
            status = run(machine, command, out, _write)
        _say(f"the guest ran for {time.monotonic() - began:.0f} s; the status of the command is {status}")
    except Unavailable as reason:
        _say(f"{'failed' if chosen.require else 'skipped'}: {reason}")
        return 1 if chosen.require else 0
    return status


def _say(line: str) -> None:
    sys.stderr.write(f"rdma guest: {line}\n")


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
