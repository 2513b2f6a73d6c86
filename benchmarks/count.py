"""Counts what one operation costs: system calls, context switches and processor time of agent and ranks.

    allreduced run --nodes 1 --ranks-per-node 4 -- python -m benchmarks.count 4096 view

prints one line of rank 0. With ``--strace`` (which must be installed, and allowed to attach) it prints the system calls
of the node's agent and of rank 0 instead; times mean nothing then.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allreduced.client import Communicator, connect

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process: seconds of processor time, context switches that it asked for and that it suffered."""

    user: float
    system: float
    waits: int
    preemptions: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nbytes", type=int)
    parser.add_argument("mode", choices=["view", "out", "new"], help="shared memory and views, out=x, or new arrays")
    parser.add_argument("--iterations", type=int, default=0)
    parser.add_argument("--strace", action="store_true")
    arguments = parser.parse_args()
    iterations = arguments.iterations or max(20, min(2000, (100 << 20) // arguments.nbytes))
    with connect() as comm:
        call = prepare(comm, arguments.nbytes // 4, arguments.mode)
        for _ in range(10):
            call()
        comm.barrier()
        if arguments.strace:
            trace(comm, call, iterations)
        else:
            measure(comm, call, iterations)
        comm.barrier()


def prepare(comm: Communicator, count: int, mode: str) -> Callable[[], object]:
    """Return the call that is measured."""
    if mode == "view":
        shared = comm.empty((count,), "float32")
        shared.fill(1)
        return lambda: comm.all_reduce(shared, view=True)
    array = np.ones(count, np.float32)
    if mode == "out":
        return lambda: comm.all_reduce(array, out=array, op="max")
    return lambda: comm.all_reduce(array)


def measure(comm: Communicator, call: Callable[[], object], iterations: int) -> None:
    """Print processor time and context switches for each operation."""
    agent = agent_pid()
    before, mine = usage_of(agent), own_usage()
    begin = time.perf_counter()
    for _ in range(iterations):
        call()
    seconds = time.perf_counter() - begin
    after, mine_after = usage_of(agent), own_usage()
    if comm.rank == 0:
        print(f"{seconds / iterations * 1e6:.0f} us an operation; agent: {told(before, after, iterations)}")
        print(f"rank 0: {told(mine, mine_after, iterations)}")


def told(before: Usage, after: Usage, iterations: int) -> str:
    return (
        f"user {(after.user - before.user) / iterations * 1e6:.0f} us, "
        f"system {(after.system - before.system) / iterations * 1e6:.0f} us, "
        f"waits {(after.waits - before.waits) / iterations:.2f}, "
        f"preemptions {(after.preemptions - before.preemptions) / iterations:.2f}"
    )


def trace(comm: Communicator, call: Callable[[], object], iterations: int) -> None:
    """Print the system calls of each operation, of the agent with all its threads and of rank 0."""
    counts: dict[str, dict[str, int]] = {}
    for what, pid in (("agent", agent_pid()), ("rank 0", os.getpid())):
        comm.barrier()
        tracer = None
        with tempfile.TemporaryDirectory() as folder:
            if comm.rank == 0:
                tracer = subprocess.Popen(
                    [shutil.which("strace") or "strace", "-f", "-c", "-p", str(pid), "-o", f"{folder}/counts"],
                    stderr=subprocess.PIPE,
                    text=True,
                )
                if tracer.stderr is not None:
                    tracer.stderr.readline()  # "attached"
            comm.barrier()
            for _ in range(iterations):
                call()
            comm.barrier()
            if tracer is not None:
                tracer.send_signal(signal.SIGINT)
                tracer.communicate()
                counts[what] = read_counts(Path(folder) / "counts")
    if comm.rank == 0:
        for what, found in counts.items():
            listed = ", ".join(f"{name} {number / iterations:.2f}" for name, number in found.items())
            print(f"{what}: {sum(found.values()) / iterations:.1f} system calls an operation: {listed}")


def read_counts(path: Path) -> dict[str, int]:
    """Return the calls by name from strace's summary."""
    found = {}
    for line in path.read_text().splitlines():
        fields = line.split()
        if len(fields) >= 5 and fields[0][:1].isdigit() and fields[-1] != "total":
            found[fields[-1]] = int(fields[3])
    return found


def usage_of(pid: int) -> Usage:
    """Return the usage of a process, its threads together."""
    user = system = waits = preemptions = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line)
        waits += int(status["voluntary_ctxt_switches"])
        preemptions += int(status["nonvoluntary_ctxt_switches"])
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    user, system = int(fields[11]), int(fields[12])
    return Usage(user / TICKS, system / TICKS, waits, preemptions)


def own_usage() -> Usage:
    found = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(found.ru_utime, found.ru_stime, found.ru_nvcsw, found.ru_nivcsw)


def agent_pid() -> int:
    """Return the process that serves this rank."""
    name = os.environ["ALLREDUCED_SOCKET"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect("\0" + name[1:] if name.startswith("@") else name)
        pid: int = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


if __name__ == "__main__":
    main()
