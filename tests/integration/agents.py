"""Real agent processes for tests."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from allreduced.core.errors import AllReducedError, from_wire

START_SECONDS = 60.0
STOP_SECONDS = 60.0
LOG_SECONDS = 60.0
TRACEBACK_SECONDS = 10.0


class Process(Protocol):
    """What tests do with a process; ``subprocess.Popen`` is one."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


@dataclass
class AgentProcess:
    """An agent that is ready."""

    node: str
    socket: str
    listen: str
    process: Process
    log: IO[bytes]

    def kill(self) -> None:
        """End it as the kernel does when memory runs out."""
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    def stop(self) -> int:
        """Ask it to stop; return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Return its exit status once it has ended by itself."""
        return self.process.wait(STOP_SECONDS)

    def says(self, text: str, times: int = 1) -> bool:
        """Return whether it wrote a text so often. It may take a moment: a thread of its own writes its log."""
        until = time.monotonic() + LOG_SECONDS
        while self.logged().count(text) < times and time.monotonic() < until:
            time.sleep(0.01)  # another process writes it
        return self.logged().count(text) >= times

    def logged(self) -> str:
        """Return what it wrote to standard error so far, but for what a busy machine makes it say."""
        lines = Path(self.log.name).read_text().splitlines(keepends=True)
        return "".join(line for line in lines if " event=held_up " not in line)


class NotStarted(Exception):
    """An agent said why it did not start: ``error``, its exit ``status`` and what it wrote."""

    def __init__(self, error: AllReducedError | None, status: int, stderr: str) -> None:
        super().__init__(f"{error} status={status} stderr={stderr}")
        self.error = error
        self.status = status
        self.stderr = stderr


StartAgent = Callable[..., AgentProcess]


def start_process(
    node: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    log: IO[bytes],
    prefix: tuple[str, ...] = (),
    pass_fds: tuple[int, ...] = (),
) -> AgentProcess:
    """Start an agent and return it when it is ready. ``prefix``: stands before its command, and execs it.

    ``pass_fds``: descriptors that it inherits.

    :raises NotStarted: it ended instead.
    """
    name = f"@allreduced-test-{secrets.token_hex(8)}"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("ALLREDUCED_", "XDG_RUNTIME"))}
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as ready:
        try:
            process = subprocess.Popen(
                [
                    *(*prefix, sys.executable, "-P", "-m", "allreduced.cli.main", "agent"),
                    *("--node", node, "--socket", name, "--ready-fd", str(writing)),
                    *arguments,
                ],
                pass_fds=[writing, *pass_fds],
                stdin=subprocess.DEVNULL,
                stderr=log,
                env=clean | {"PYTHONFAULTHANDLER": "1"} | environment,
            )
        finally:
            os.close(writing)
        return when_ready(node, process, ready, log)


def when_ready(
    node: str, process: Process, ready: IO[bytes], log: IO[bytes], seconds: float = START_SECONDS
) -> AgentProcess:
    """Return an agent that was started when it has written its line to ``ready``, within so many seconds.

    :raises NotStarted: it ended instead.
    """
    readable, _, _ = select.select([ready], [], [], seconds)
    line = ready.readline() if readable else b""
    answer = json.loads(line) if line else {}
    if answer.get("ready") is not True:
        status = process.wait(STOP_SECONDS) if readable else _end_hung(process)
        code, message, hint, facts = answer.get("error", ("internal", "no ready line", "", {}))
        raise NotStarted(from_wire((code, message, hint, facts)), status, Path(log.name).read_text())
    return AgentProcess(node, answer["socket"], answer["listen"], process, log)


def _end_hung(process: Process) -> int:
    """Let a process that does not get ready write where it is, and end it; return its exit status."""
    process.send_signal(signal.SIGABRT)
    try:
        return process.wait(TRACEBACK_SECONDS)
    except subprocess.TimeoutExpired:  # it hangs in the kernel, or runs without the fault handler
        process.kill()
        return process.wait(STOP_SECONDS)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a TCP port of the loopback interface that is nobody else's meanwhile.

    It is bound here and not listened at, so that connections are refused, the kernel gives it to nobody who asks for
    any port, and an agent may still listen there, for it sets SO_REUSEADDR too.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port: int = reserved.getsockname()[1]
        yield port


def complaints(log: str) -> list[str]:
    """Return the lines of a log, but for those that say that the machine was too busy to run the agent."""
    return [line for line in log.splitlines() if "event=held_up" not in line]


def end_processes(started: list[AgentProcess]) -> None:
    """End all agents that still run, by force if need be."""
    for agent in started:
        if agent.process.poll() is None:
            agent.process.send_signal(signal.SIGTERM)
    for agent in started:
        try:
            agent.process.wait(5.0)
        except subprocess.TimeoutExpired:
            agent.kill()
