"""The half of a started job that the shell sees: it starts the supervisor, passes signals on, and gives the status."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType

from allreduced.cli.console import complain
from allreduced.cli.job import Job, python_module
from allreduced.cli.processes import FORWARDED, become_subreaper, descendants, kill_descendants, signal_name
from allreduced.core.errors import ConfigError
from allreduced.core.limits import MAX_RANKS


def run_job(job: Job, on_line: Callable[[bytes], None] | None = None) -> int:
    """Run ``job`` to its end and return its exit status; when this returns, no process of it is left.

    ``on_line`` gets each line that rank 0 writes to its channel (see ``CHANNEL_VARIABLE``), without the newline.
    127 is returned where the command is not found and 126 where it may not be run; nothing was started then.

    :raises ConfigError: it has more ranks than there may be.
    """
    if job.size > MAX_RANKS:
        raise ConfigError(
            f"{job.nodes} nodes with {job.ranks_per_node} ranks each are {job.size} ranks; "
            f"a group has {MAX_RANKS} ranks at most",
            path="--ranks-per-node",
            hint="lower --nodes or --ranks-per-node",
        )
    status = _check_command(job)
    if status:
        return status
    spared = frozenset(process.pid for process in descendants(os.getpid()))
    become_subreaper()
    channel = _Channel(on_line) if on_line is not None else None
    theirs = channel.far_fd if channel is not None else -1
    link, far_link = socket.socketpair()
    with link:
        # Blocked, and so inherited, until the supervisor has its handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        with far_link:
            supervisor = subprocess.Popen(
                [*python_module("allreduced.cli.supervisor"), str(far_link.fileno())],
                pass_fds=[fd for fd in (far_link.fileno(), theirs) if fd >= 0],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        if channel is not None:
            channel.close_far_end()
        try:
            with _forwarding(supervisor):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: seen below
                    link.sendall(replace(job, channel=theirs).to_json())
                _listen(link, channel)
                code = supervisor.wait()
        finally:
            kill_descendants(spared)
            if channel is not None:
                channel.close()
    if code < 0:
        complain(f"allreduced: error: the supervisor of the job was killed by {signal_name(-code)}; all was stopped")
        return 128 - code
    return code


def _check_command(job: Job) -> int:
    name = job.command[0]
    path = job.environment.get("PATH", os.environ.get("PATH", os.defpath))
    if shutil.which(name, path=path):
        return 0
    if os.path.lexists(name):
        hint = f"try: chmod +x {name}" + ("" if "/" in name else f", or ./{name}")
        if name.endswith(".py"):
            hint = f"try: python {name}"
        complain(f"allreduced: error: {name} is not an executable command\n  hint: {hint}")
        return 126
    complain(f"allreduced: error: command not found: {name}")
    return 127


@contextlib.contextmanager
def _forwarding(supervisor: subprocess.Popen[bytes]) -> Iterator[None]:
    def forward(number: int, _frame: FrameType | None) -> None:
        supervisor.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(link: socket.socket, channel: _Channel | None) -> None:
    """Pass on what comes from the channel, until the supervisor's end of the link is closed."""
    with selectors.PollSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        if channel is not None:
            selector.register(channel.fd, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is link:
                    if not _receive(link):
                        return
                elif channel is not None and not channel.read():
                    selector.unregister(channel.fd)


def _receive(link: socket.socket) -> bytes:
    try:
        return link.recv(1)
    except ConnectionResetError:
        return b""


class _Channel:
    """The pipe on which rank 0 sends lines."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self.fd, self.far_fd = os.pipe()
        self._on_line = on_line
        self._partial = b""

    def read(self) -> bool:
        """Take one piece; false at the end."""
        data = os.read(self.fd, 65536)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._on_line(line)
        return bool(data)

    def close_far_end(self) -> None:
        """Forget the far end: the supervisor has it now."""
        os.close(self.far_fd)
        self.far_fd = -1

    def close(self) -> None:
        """Read what is left and close. Nobody holds the far end any more."""
        while self.read():
            pass
        os.close(self.fd)
