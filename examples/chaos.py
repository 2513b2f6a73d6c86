"""Break a job of your own on purpose, at random moments, and see what it does.

Kills, stops and cuts off agents and ranks of a job that it starts, or of one that runs already:

    python examples/chaos.py -- allreduced run --nodes 3 --ranks-per-node 2 -- python train.py
    python examples/chaos.py --kinds cut,pause-agent --every 2 -- torchrun --nproc-per-node 4 train.py
    python examples/chaos.py --kinds kill-rank --faults 1 --runs 20 -- allreduced run --nodes 3 -- python train.py
    python examples/chaos.py --pid 4711 --faults 3

It touches only processes below the one that it started, or below the one that --pid names. Linux only; it needs
nothing but Python, and the rights to signal these processes; to cut connections, also to trace them.
"""

import argparse
import collections
import contextlib
import ctypes
import itertools
import os
import random
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

RANK_VARIABLES = ("ALLREDUCED_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
GRACE_SECONDS = 5.0
PR_SET_CHILD_SUBREAPER = 36
SYS_PIDFD_GETFD = 438
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    """A process of the job. ``name``: as the report calls it."""

    pid: int
    name: str


# Who belongs to the job


def below(root: int) -> list[int]:
    """Return ``root`` and all processes below it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            text = stat.read_text()
            parent = int(text[text.rindex(")") + 2 :].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [root]
    for pid in found:  # grows while it is walked
        found += children.get(pid, [])
    return found


def command_of(pid: int) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def rank_of(pid: int) -> str | None:
    """Return the rank that the launcher gave to a process, if it did."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return None
    given = dict(variable.split("=", 1) for variable in variables if "=" in variable)
    return next((given[name] for name in RANK_VARIABLES if name in given), None)


def is_agent(command: list[str]) -> bool:
    """Return whether this is the command of an agent: `allreduced agent …`, or the same by `python -m`."""
    words = [Path(word).name for word in command]
    return any(
        pair in itertools.pairwise(words) for pair in (("allreduced", "agent"), ("allreduced.cli.main", "agent"))
    )


def members(root: int) -> tuple[list[Process], list[Process]]:
    """Return the agents and the ranks of the job. What a rank has started itself is no rank."""
    agents, ranks = [], []
    seen = set()
    for pid in below(root):  # parents come before their children
        command = command_of(pid)
        if is_agent(command):
            node = command[command.index("--node") + 1] if "--node" in command else "of this node"
            agents.append(Process(pid, f"agent {node} (pid {pid})"))
        elif command and (rank := rank_of(pid)) is not None and rank not in seen:
            seen.add(rank)
            ranks.append(Process(pid, f"rank {rank} (pid {pid})"))
    return agents, ranks


# What can happen to them


def kill(process: Process, _seconds: float) -> str:
    """End a process as the kernel does when memory runs out."""
    os.kill(process.pid, signal.SIGKILL)
    return f"killed {process.name}"


def pause(process: Process, seconds: float) -> str:
    """Stop a process for a while, as a debugger or a machine that swaps does."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    return f"stopped {process.name} for {seconds:g} s"


def cut(process: Process, _seconds: float) -> str:
    """End all TCP connections of a process, as a firewall that was restarted does. It may connect again at once."""
    connections = list(tcp_connections(process.pid))
    for connection in connections:
        with connection, contextlib.suppress(OSError):  # it ended by itself
            connection.shutdown(socket.SHUT_RDWR)
    return f"cut {len(connections)} connections of {process.name}" if connections else ""


def tcp_connections(pid: int) -> Iterator[socket.socket]:
    """Open the established TCP connections of another process."""
    established = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "01":
                    established.add(fields[9])
    process = os.pidfd_open(pid)
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                inode = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
                if inode and inode[1] in established:
                    copy = LIBC.syscall(SYS_PIDFD_GETFD, process, int(entry.name), 0)
                    if copy < 0:
                        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                    yield socket.socket(fileno=copy)
    finally:
        os.close(process)


KINDS: dict[str, tuple[str, Callable[[Process, float], str]]] = {
    "kill-agent": ("agents", kill),
    "kill-rank": ("ranks", kill),
    "pause-agent": ("agents", pause),
    "pause-rank": ("ranks", pause),
    "cut": ("agents", cut),
}


# The job


class Job:
    """A job that was started here, or that runs already."""

    def __init__(self, command: list[str], pid: int) -> None:
        self.started = subprocess.Popen(command, process_group=0) if command else None
        self.pid = self.started.pid if self.started is not None else pid
        self._end = os.pidfd_open(self.pid)

    def ends_within(self, seconds: float) -> bool:
        """Wait for the job's end, but not for longer."""
        return bool(select.select([self._end], [], [], max(seconds, 0.0))[0])

    def stop(self) -> None:
        """Stop a job that was started here, by force if need be; let go of any other."""
        if self.started is not None:
            if not self.ends_within(0.0):
                self.started.terminate()
            if not self.ends_within(GRACE_SECONDS):
                self.started.kill()
            self.started.wait()
        os.close(self._end)

    def outcome(self) -> str:
        """Return in words how it ended."""
        status = self.started.poll() if self.started is not None else None
        if status is None:
            return "ended" if self.started is None else "was still running"
        return f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"


class Chaos:
    """Injects faults into jobs and writes down what happened."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._random = random.Random(arguments.seed)
        self.counts: collections.Counter[str] = collections.Counter()

    def attack(self, job: Job) -> bool:
        """Inject faults until the job ends; return whether it did within the limit."""
        arguments = self._arguments
        start = last = time.monotonic()
        faults = 0
        while True:
            left = start + arguments.limit - time.monotonic()
            pause_before = self._random.uniform(0.5, 1.5) * arguments.every
            done = faults == arguments.faults
            if job.ends_within(left if done else min(left, pause_before)):
                after = time.monotonic() - last
                say(f"the job {self._ended(job)} {after:.2f} s after its {'last fault' if faults else 'start'}")
                return True
            if time.monotonic() >= start + arguments.limit:
                say(f"the job did not end within {arguments.limit:g} s")
                return False
            said = self._fault(job)
            if said:
                last = time.monotonic()
                faults += 1
                say(f"{last - start:6.2f} s: {said}")
                if faults == arguments.faults:
                    say("no more faults: waiting for the end of the job")

    def _fault(self, job: Job) -> str:
        """Inject one fault; return what it was, empty where there is nobody yet to inject it into."""
        agents, ranks = members(job.pid)
        kind = self._random.choice(self._arguments.kinds)
        whom, act = KINDS[kind]
        found = agents if whom == "agents" else ranks
        if not found:
            return ""
        process = self._random.choice(sorted(found, key=lambda one: one.name))
        try:
            said = act(process, self._arguments.pause)
        except ProcessLookupError:  # it ended a moment ago
            return ""
        except PermissionError as error:
            raise SystemExit(
                f"chaos: {kind} of {process.name} is not permitted ({error.strerror}); "
                "run this as the user of the job, and for cut let it start the job, or run it as root"
            ) from error
        if said:
            self.counts[kind] += 1
        return said

    @staticmethod
    def _ended(job: Job) -> str:
        if job.started is not None:
            job.started.wait()
        return job.outcome()


def say(text: str) -> None:
    """Write a line of the report, apart from what the job itself writes."""
    print(f"chaos: {text}", file=sys.stderr, flush=True)


def read_arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] -- CMD [ARG ...]",
    )
    add = parser.add_argument
    add("--kinds", default=",".join(KINDS), help="what may happen (default: %(default)s)")
    add(
        "--every",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds from one fault to the next, on average (default: %(default)g)",
    )
    add(
        "--pause",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds that a pause lasts; an agent that is stopped for longer than failure.failure_timeout (5 s) is "
        "given up by the others (default: %(default)g)",
    )
    add("--faults", type=int, default=-1, metavar="N", help="faults in each run (default: until the job ends)")
    add("--runs", type=int, default=1, metavar="N", help="how often the job is started (default: %(default)d)")
    add(
        "--limit",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds in which a run must end; else it is stopped, and the status is 124 (default: %(default)g)",
    )
    add("--seed", type=int, metavar="N", help="draws the same faults again (default: others each time)")
    add("--pid", type=int, default=0, metavar="N", help="a job that runs already: its uppermost process")
    add("command", nargs=argparse.REMAINDER, metavar="CMD", help="the command that starts the job")
    arguments = parser.parse_args()
    arguments.command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    arguments.kinds = arguments.kinds.split(",")
    for kind in arguments.kinds:
        if kind not in KINDS:
            parser.error(f"there is no fault {kind!r}, only {', '.join(KINDS)}")
    if bool(arguments.command) == bool(arguments.pid):
        parser.error("give a command after --, or the --pid of a job that runs")
    if min(arguments.every, arguments.pause, arguments.limit) <= 0 or arguments.runs < 1:
        parser.error("times and --runs must be greater than 0")
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1 << 32)
    return arguments


def main() -> int:
    """Run the job as often as asked, with faults; return the exit status of the last run that failed, or 0."""
    arguments = read_arguments()
    # Orphans of the job, such as a private agent whose rank was killed, stay below this process and are found.
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    chaos = Chaos(arguments)
    failed = 0
    for run in range(1, arguments.runs + 1):
        what = shlex.join(arguments.command) or f"the job of process {arguments.pid}"
        say(f"run {run} of {arguments.runs}, seed {arguments.seed}: {what}")
        job = Job(arguments.command, arguments.pid)
        try:
            in_time = chaos.attack(job)
        finally:
            job.stop()
        status = job.started.returncode if job.started is not None else 0
        if not in_time or status:
            failed = 124 if not in_time else status if status > 0 else 128 - status
    counts = ", ".join(f"{number} × {kind}" for kind, number in sorted(chaos.counts.items())) or "none"
    say(f"faults of {arguments.runs} runs: {counts}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
