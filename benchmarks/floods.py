"""What floods of connections cost a job: ``python -m benchmarks.floods``.

Two agents, one rank each, reduce tensors of 1 MiB in a loop. In every other stretch of time another process holds 1,000
connections that send nothing and 1,000 that send garbage to the clients' socket of one agent, and as many to its port:
those that the agent drops are opened anew, each one once a stretch, spread over it. The ratio is the median number of
calls in the flooded stretches over that of the quiet ones. What the flooding process itself takes of the machine, which
the job lacks, is printed too, and not taken out of the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import secrets
import select
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import TypeAlias

from allreduced.client import connect

WANTED = 0.9
SECRET = "benchmark"
COUNT = 1 << 18


Door: TypeAlias = "str | tuple[str, int]"
"""Where an agent listens, as ``connect`` takes it."""

START_SECONDS = 60.0
"""Seconds in which the job must have begun."""


def main() -> int:
    """Measure; print the ratio; return 1 where it is below 0.9."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floods", description=__doc__)
    parser.add_argument("--connections", type=int, default=1000, help="of each kind at each door (default: 1000)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one stretch (default: 4)")
    parser.add_argument("--stretches", type=int, default=5, help="of each kind (default: 5)")
    parser.add_argument("--only", choices=["socket", "port"], help="flood one door only")
    options = parser.parse_args()
    _raise_descriptors()
    spawn = get_context("spawn")
    with ExitStack() as stack:
        first = stack.enter_context(agent("a"))
        second = stack.enter_context(agent("b", "--peer", f"a={first['listen']}"))
        calls: Synchronized[int] = spawn.Value("q", 0)
        for rank, name in enumerate((first["socket"], second["socket"])):
            process = spawn.Process(target=train, args=(name, rank, calls), daemon=True)
            process.start()
            stack.callback(process.kill)
        until = time.monotonic() + START_SECONDS
        while not calls.value:
            if time.monotonic() > until:
                raise SystemExit(f"the job did not run within {START_SECONDS:g} s")
            time.sleep(0.05)  # a shared number wakes nobody
        sys.stderr.write("the job runs\n")
        doors: list[Door] = [] if options.only == "port" else [first["socket"].replace("@", "\0", 1)]
        if options.only != "socket":
            host, _, port = first["listen"].removeprefix("tcp://").rpartition(":")
            doors.append((host, int(port)))
        quiet: list[float] = []
        flooded: list[float] = []
        own: list[float] = []
        opened = 0
        for _ in range(options.stretches):
            quiet.append(_calls(calls, options.seconds))
            near, far = spawn.Pipe()
            flooder = spawn.Process(target=flood, args=(doors, options.connections, options.seconds, far), daemon=True)
            flooder.start()
            far.close()  # so that the end of that process ends the waits for it
            near.recv()  # all connections are open
            flooded.append(_calls(calls, options.seconds))
            opened, spent = near.recv()
            own.append(spent / options.seconds / len(os.sched_getaffinity(0)))
            flooder.join()
            sys.stderr.write(f"quiet {quiet[-1]:.0f} calls/s, flooded {flooded[-1]:.0f}, {opened} connections\n")
            time.sleep(1.0)  # what the agent still has of them ends
        ratio = statistics.median(flooded) / statistics.median(quiet)
    print(f"calls/s quiet:   {_listed(quiet)}")
    print(f"calls/s flooded: {_listed(flooded)}  ({opened} connections a stretch)")
    print(f"the flooding process took {statistics.median(own):.1%} of the processors")
    print(f"ratio of the medians: {ratio:.3f}, at least {WANTED} is wanted")
    return int(ratio < WANTED)


def train(name: str, rank: int, calls: Synchronized[int]) -> None:
    """Reduce for ever."""
    with connect(job="floods", rank=rank, size=2, local_rank=0, local_size=1, socket=name) as comm:
        buffer = comm.zeros(COUNT, "float32")
        while True:
            comm.all_reduce(buffer, view=True)
            if rank == 0:
                calls.value += 1


def flood(doors: list[Door], connections: int, seconds: float, pipe: Connection) -> None:
    """Hold connections for ``seconds``, and tell ``pipe`` when they are open and how many there were in the end."""
    _raise_descriptors()
    rng = random.Random(1)
    with selectors.DefaultSelector() as selector:
        kinds = [(door, garbage) for door in doors for garbage in (False, True)] * connections
        rng.shuffle(kinds)
        for kind in kinds:
            _open(selector, *kind, rng)
            _close_ended(selector, [])
        pipe.send(None)
        began, spent = time.monotonic(), time.process_time()
        opened = len(kinds)
        lost: list[tuple[Door, bool]] = []
        while (now := time.monotonic() - began) < seconds:
            _close_ended(selector, lost)
            while lost and opened - len(kinds) < len(kinds) * now / seconds:
                _open(selector, *lost.pop(), rng)
                opened += 1
            time.sleep(0.01)  # spreads what is opened anew over the stretch
        for key in list(selector.get_map().values()):
            _socket_of(key).close()
    pipe.send((opened, time.process_time() - spent))


def _open(selector: selectors.BaseSelector, door: Door, garbage: bool, rng: random.Random) -> None:
    family = socket.AF_UNIX if isinstance(door, str) else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(5.0)
    try:
        sock.connect(door)
        if garbage:
            sock.send(rng.randbytes(rng.randrange(1, 300)))
    except OSError:
        sock.close()
        return
    sock.setblocking(False)
    selector.register(sock, selectors.EVENT_READ, (door, garbage))


def _socket_of(key: selectors.SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket)  # nothing else is registered
    return key.fileobj


def _close_ended(selector: selectors.BaseSelector, lost: list[tuple[Door, bool]]) -> None:
    for key, _ in selector.select(0):
        sock = _socket_of(key)
        with suppress(OSError):
            if sock.recv(4096):
                continue
        selector.unregister(sock)
        sock.close()
        lost.append(key.data)


@contextmanager
def agent(node: str, *arguments: str) -> Iterator[dict[str, str]]:
    """Start an agent; yield what it says when it is ready."""
    name = f"@allreduced-floods-{secrets.token_hex(8)}"
    reading, writing = os.pipe()
    command = [sys.executable, "-P", "-m", "allreduced.cli.main", "agent", "--node", node, "--socket", name]
    command += ["--listen", "tcp://127.0.0.1:0", "--ready-fd", str(writing), *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ALLREDUCED_")}
    environment |= {"ALLREDUCED_SECRET": SECRET, "ALLREDUCED_AGENT_LOG_LEVEL": "error"}
    process = subprocess.Popen(command, pass_fds=[writing], stdin=subprocess.DEVNULL, env=environment)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as ready:
            select.select([ready], [], [], 60.0)
            answer = json.loads(ready.readline() or b"{}")
        if answer.get("ready") is not True:
            raise SystemExit(f"agent {node!r} did not start: {answer}")
        yield answer
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _calls(calls: Synchronized[int], seconds: float) -> float:
    began, before = time.monotonic(), calls.value
    time.sleep(seconds)
    return (calls.value - before) / (time.monotonic() - began)


def _listed(rates: list[float]) -> str:
    return " ".join(f"{rate:.0f}" for rate in rates)


def _raise_descriptors() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
