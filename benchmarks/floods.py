"""What floods of connections cost a job: ``python -m benchmarks.floods``.

Two agents, one rank each, reduce tensors of 1 MiB in a loop. In every other stretch of time another process tries to
open 1,000 connections that send nothing and 1,000 that send garbage at the clients' socket of one agent, and as many at
its port, spread over the stretch, and holds what is not dropped. The socket turns those away that find its queue full.
In turns with that it does the same at two doors that nobody serves: what that costs, the flood takes of this machine
and not of the agent. A ratio is the calls in a flooded stretch over the mean of the quiet stretches before and after.
"""

from __future__ import annotations

import argparse
import errno
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
from socket import AF_INET, AF_UNIX
from typing import TypeAlias

from allreduced.client import connect
from allreduced.daemon.socket_path import BACKLOG as SOCKET_BACKLOG
from allreduced.transports.tcp.listener import BACKLOG as PORT_BACKLOG

WANTED = 0.9
SECRET = "benchmark"
COUNT = 1 << 18


Door: TypeAlias = "str | tuple[str, int]"
"""Where an agent listens, as ``connect`` takes it."""

PAUSE_SECONDS = 0.1
"""Between two handfuls of connections. A process that wakes more often costs a job on two cores more than the flood."""

START_SECONDS = 60.0
"""Seconds in which the job must have begun."""


def main() -> int:
    """Measure; print the ratios; return 1 where that of the agent's doors is below 0.9."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floods", description=__doc__)
    parser.add_argument("--connections", type=int, default=1000, help="of each kind at each door (default: 1000)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of one stretch (default: 8)")
    parser.add_argument("--stretches", type=int, default=7, help="of each flood (default: 7)")
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
        host, _, port = first["listen"].removeprefix("tcp://").rpartition(":")
        floods: dict[str, list[Door]] = {
            "the agent's doors": [first["socket"].replace("@", "\0", 1), (host, int(port))],
            "doors of nobody": [stack.enter_context(_unserved(family)) for family in (AF_UNIX, AF_INET)],
        }
        quiet = _calls(calls, options.seconds)
        ratios: dict[str, list[float]] = {name: [] for name in floods}
        for name, doors in list(floods.items()) * options.stretches:
            chosen = [door for door in doors if options.only in (None, "socket" if isinstance(door, str) else "port")]
            near, far = spawn.Pipe()
            arguments = (chosen, options.connections, options.seconds, far)
            flooder = spawn.Process(target=flood, args=arguments, daemon=True)
            flooder.start()
            far.close()  # so that the end of that process ends the waits for it
            near.recv()
            flooded = _calls(calls, options.seconds)
            opened, full, spent = near.recv()
            flooder.join()
            time.sleep(1.0)  # what the agent still has of them ends
            before, quiet = quiet, _calls(calls, options.seconds)
            ratios[name].append(flooded / ((before + quiet) / 2))
            sys.stderr.write(
                f"{name}: quiet {before:.0f}, flooded {flooded:.0f}, quiet {quiet:.0f} calls/s, {opened} tried, "
                f"of which {full} found a full queue, {spent / options.seconds:.1%} of a core\n"
            )
    for name, all_of_it in ratios.items():
        listed = " ".join(f"{ratio:.2f}" for ratio in sorted(all_of_it))
        print(f"{name + ':':20}{statistics.median(all_of_it):.3f}  ({listed})")
    agents, nobodys = (statistics.median(ratios[name]) for name in floods)
    print(f"at the agent's doors over at doors of nobody: {agents / nobodys:.3f}")
    print(f"at least {WANTED} is wanted at the agent's doors: {'met' if agents >= WANTED else 'missed'}")
    return int(agents < WANTED)


@contextmanager
def _unserved(family: socket.AddressFamily) -> Iterator[Door]:
    """Listen somewhere with a queue as long as an agent's, and accept nobody."""
    with socket.socket(family) as sock:
        sock.bind(("127.0.0.1", 0) if family == AF_INET else f"\0allreduced-nobody-{secrets.token_hex(8)}")
        sock.listen(PORT_BACKLOG if family == AF_INET else SOCKET_BACKLOG)
        name = sock.getsockname()
        yield name if family == AF_INET else name.decode()


def train(name: str, rank: int, calls: Synchronized[int]) -> None:
    """Reduce for ever."""
    with connect(job="floods", rank=rank, size=2, local_rank=0, local_size=1, socket=name) as comm:
        buffer = comm.zeros(COUNT, "float32")
        while True:
            comm.all_reduce(buffer, view=True)
            if rank == 0:
                calls.value += 1


def flood(doors: list[Door], connections: int, seconds: float, pipe: Connection) -> None:
    """Open connections, spread over ``seconds``, and hold them.

    ``pipe`` is told when that begins, and at the end how many were tried, how many of them found a full queue, and
    what it took of the processor in seconds.
    """
    _raise_descriptors()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # it stands for machines elsewhere
    rng = random.Random(1)
    kinds = [(door, garbage) for door in doors for garbage in (False, True)] * connections
    rng.shuffle(kinds)
    with selectors.DefaultSelector() as selector:
        pipe.send(None)
        began, spent = time.monotonic(), time.process_time()
        opened = full = 0
        while (now := time.monotonic() - began) < seconds:
            _serve(selector)
            for door, garbage in kinds[opened : int(len(kinds) * now / seconds)]:
                full += not _open(selector, door, garbage, rng)
                opened += 1
            time.sleep(PAUSE_SECONDS)
        spent = time.process_time() - spent
        for key in list(selector.get_map().values()):
            _socket_of(key).close()
    pipe.send((opened, full, spent))


def _open(selector: selectors.BaseSelector, door: Door, garbage: bool, rng: random.Random) -> bool:
    """Begin to connect. Where the queue is full, the system tries on at a port; at a socket return false."""
    family = socket.AF_UNIX if isinstance(door, str) else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    if sock.connect_ex(door) not in (0, errno.EINPROGRESS):
        sock.close()
        return False
    waste = rng.randbytes(rng.randrange(1, 300)) if garbage else b""
    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if garbage else 0)
    selector.register(sock, events, waste)
    return True


def _socket_of(key: selectors.SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket)  # nothing else is registered
    return key.fileobj


def _serve(selector: selectors.BaseSelector) -> None:
    """Send garbage where a connection was made; close what the other side closed."""
    for key, events in selector.select(0):
        sock = _socket_of(key)
        with suppress(OSError):
            if events & selectors.EVENT_WRITE:
                sock.send(key.data)
                selector.modify(sock, selectors.EVENT_READ)
                continue
            if sock.recv(4096):
                continue
        selector.unregister(sock)
        sock.close()


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


def _raise_descriptors() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
