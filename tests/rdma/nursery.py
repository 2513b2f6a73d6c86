"""Agents and ranks that start at once: forked from one process that has loaded everything.

In the guest a Python that imports the agent takes ten seconds, and tests kill and restart many.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, NoReturn, Self

ROOT: Final = Path(__file__).resolve().parents[2]

LOADED: Final = (
    "numpy",
    "uvloop",
    "allreduced.cli.main",
    "allreduced.daemon.agent",
    "allreduced.daemon.settings_reader",
    "allreduced.transports.tcp",
    "allreduced.transports.rdma",
    "allreduced.transports.rdma.transport",
    *(f"pyverbs.{name}" for name in ("device", "pd", "cq", "mr", "qp", "wr", "addr", "enums", "libibverbs_enums")),
    "allreduced.client",
    "tests.chaos.rank",
)
"""What the nursery imports before it forks. Nothing of it opens a device, starts a thread or makes a loop."""

START_SECONDS: Final = 120.0
_MOST_DESCRIPTORS: Final = 8
_ABOVE: Final = 512
"""Descriptors from here on are free."""


class Copy:
    """A process of the nursery, with what is used of ``subprocess.Popen``."""

    def __init__(self, pid: int, status: int, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._pipe = status
        """Tells the exit status when it has ended; -1 when that was read."""
        self._status = 0

    def poll(self) -> int | None:
        """Return its exit status (negative: the signal that ended it), None while it runs."""
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status once it has ended.

        :raises subprocess.TimeoutExpired: it has not within ``timeout`` seconds.
        """
        status = self._read(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, if it still runs."""
        self.send_signal(signal.SIGKILL)

    def _read(self, seconds: float | None) -> int | None:
        if self._pipe >= 0:
            readable, _, _ = select.select([self._pipe], [], [], seconds)
            if not readable:
                return None
            self._status = int(os.read(self._pipe, 16) or b"-9")  # nothing: the nursery itself was killed
            os.close(self._pipe)
            self._pipe = -1
        return self._status


class Nursery:
    """The process that everything is forked from; a context manager, which ends it and all that it has started."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.rdma.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=clean_environment() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait(START_SECONDS)

    def start(
        self,
        function: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        log: IO[bytes],
        *,
        pipes: bool = False,
        passed: Sequence[int] = (),
    ) -> Copy:
        """Start a process that calls ``function`` (``module:name``) and exits with what it returns.

        ``words`` are its command line, ``environment`` is all it has, ``log`` gets its standard error. ``passed``
        become its descriptors 3, 4 … With ``pipes`` its standard input and output are those of the returned process.
        """
        read_status, status = os.pipe()
        theirs_in, ours_in = os.pipe() if pipes else (os.open(os.devnull, os.O_RDONLY), -1)
        ours_out, theirs_out = os.pipe() if pipes else (-1, os.open(os.devnull, os.O_WRONLY))
        try:
            request = json.dumps({"function": function, "words": list(words), "environment": dict(environment)})
            descriptors = [theirs_in, theirs_out, log.fileno(), *passed, status]
            socket.send_fds(self._socket, [request.encode()], descriptors)
            pid = int(self._socket.recv(16))
        finally:
            for descriptor in (status, theirs_in, theirs_out):
                os.close(descriptor)
        if not pipes:
            return Copy(pid, read_status)
        return Copy(pid, read_status, os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb"))


def clean_environment() -> dict[str, str]:
    """Return the environment without what would reach an agent or a rank."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("ALLREDUCED_", "XDG_RUNTIME"))}


def abstract_socket() -> str:
    """Return a socket for clients that leaves no file behind."""
    return f"@allreduced-test-{secrets.token_hex(8)}"


# The nursery itself


def _serve(requests: socket.socket) -> None:
    """Fork what is asked for and tell how it ended, until nobody asks any more."""
    for module in LOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    waking, wake = socket.socketpair()
    for end in (waking, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    statuses: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(waking, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if waking in ready:
                waking.recv(4096)
                _tell_ends(statuses)
            if requests in ready:
                data, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, _MOST_DESCRIPTORS)
                if not data:
                    break
                *given, status = descriptors
                pid = os.fork()
                if pid == 0:
                    _be(json.loads(data), given)
                for descriptor in given:
                    os.close(descriptor)
                statuses[pid] = status
                requests.send(b"%d" % pid)
    for pid in statuses:
        os.kill(pid, signal.SIGKILL)


def _tell_ends(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        pipe = statuses.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(pipe)


def _be(request: dict[str, object], given: Sequence[int]) -> NoReturn:
    """Be the process that was asked for."""
    status = 70
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for place, descriptor in enumerate(given):
            os.dup2(descriptor, _ABOVE + place)
        for place in range(len(given)):
            os.dup2(_ABOVE + place, place)
        os.closerange(len(given), _ABOVE + len(given))
        words, environment = request["words"], request["environment"]
        assert isinstance(words, list)
        assert isinstance(environment, dict)
        os.environ.clear()
        os.environ.update(environment)
        faulthandler.enable()  # SIGABRT tells then where it hangs
        sys.argv[1:] = words
        module, _, name = str(request["function"]).partition(":")
        status = int(getattr(importlib.import_module(module), name)(*([words] if words else [])) or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        _serve(ours)
