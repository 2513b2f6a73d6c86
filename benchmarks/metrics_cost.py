"""What metrics cost: two agents on this machine, one with metrics and one without, called in turns.

    python -m benchmarks.metrics_cost

Two ranks at each agent reduce 1 MiB; rounds of calls alternate between the agents, while the metrics of the one that
has them are scraped every second. Prints the throughput of both (medians over the rounds) and their ratio, which is to
be 0.98 at least. Only the ratio means anything, and only on a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import multiprocessing
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np

from allreduced.client import connect

RANKS = 2
GOAL = 0.98


def main() -> int:
    """Measure and print; return 1 where the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nbytes", type=int, default=1 << 20)
    parser.add_argument("--calls", type=int, default=100, help="per round")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--period", type=float, default=1.0, help="seconds between scrapes")
    arguments = parser.parse_args()
    name = secrets.token_hex(6)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(agent(f"@cost-{name}-on", metrics=True))
        stack.enter_context(agent(f"@cost-{name}-off", metrics=False))
        pipes = [
            stack.enter_context(rank(number, f"@cost-{name}", arguments.nbytes, arguments.calls))
            for number in range(RANKS)
        ]
        scrapes = stack.enter_context(scraping(port, arguments.period))
        times: dict[str, list[float]] = {"on": [], "off": []}
        for turn in range(arguments.rounds + 1):
            for which in ("on", "off") if turn % 2 else ("off", "on"):
                for pipe in pipes:
                    pipe.send(which)
                slowest = max(float(pipe.recv()) for pipe in pipes)
                if turn:  # the first round warms up
                    times[which].append(slowest / arguments.calls)
    speeds = {which: arguments.nbytes / statistics.median(taken) / 1e9 for which, taken in times.items()}
    # Rounds next to each other saw the same machine.
    ratio = statistics.median(off / on for on, off in zip(times["on"], times["off"], strict=True))
    print(
        f"all_reduce of {arguments.nbytes} bytes, {RANKS} ranks, {arguments.rounds} rounds of {arguments.calls} calls"
    )
    print(f"metrics off  {speeds['off']:6.3f} GB/s")
    print(f"metrics on   {speeds['on']:6.3f} GB/s   {len(scrapes)} scrapes of {max(scrapes, default=0)} bytes")
    print(f"ratio        {ratio:6.3f}        goal: {GOAL} at least: {'reached' if ratio >= GOAL else 'missed'}")
    return 0 if ratio >= GOAL else 1


@contextlib.contextmanager
def agent(socket: str, *, metrics: bool) -> Iterator[int]:
    """Run an agent; the port of its metrics, or 0."""
    command = [sys.executable, "-m", "allreduced.cli.main", "agent", "--node", socket[1:], "--socket", socket]
    environment = {"ALLREDUCED_AGENT_LOG_LEVEL": "info"}
    if metrics:
        environment["ALLREDUCED_METRICS_LISTEN"] = "127.0.0.1:0"

    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
    try:
        port = 0
        for line in process.stderr or ():
            if "event=metrics_ready" in line:
                port = int(line.rsplit(":", 1)[1])
            if "event=ready" in line:
                break
        drain = threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True)
        drain.start()
        yield port
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def rank(number: int, socket: str, nbytes: int, calls: int) -> Iterator[Connection]:
    """Run a rank that answers each "on" or "off" with the seconds that its calls took."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, number, socket, nbytes, calls))
    process.start()
    try:
        yield ours
    finally:
        ours.send("")
        process.join()


def serve(pipe: Connection, number: int, socket: str, nbytes: int, calls: int) -> None:
    comms = {
        which: connect(
            job="cost", rank=number, size=RANKS, local_rank=number, local_size=RANKS, socket=f"{socket}-{which}"
        )
        for which in ("on", "off")
    }
    buffers = {which: comm.empty((nbytes // 4,), "float32") for which, comm in comms.items()}
    for buffer in buffers.values():
        buffer[:] = 1
    while which := pipe.recv():
        comm, buffer = comms[which], buffers[which]
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            comm.all_reduce(buffer, view=True)
        pipe.send(time.perf_counter() - begin)
        if float(np.asarray(comm.all_reduce(buffer))[-1]) != RANKS:
            raise SystemExit("the result is wrong")
    for comm in comms.values():
        comm.close()


@contextlib.contextmanager
def scraping(port: int, period: float) -> Iterator[list[int]]:
    """Ask for the metrics again and again; the sizes of the answers."""
    sizes: list[int] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(period):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/metrics")
            sizes.append(len(connection.getresponse().read()))
            connection.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield sizes
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
