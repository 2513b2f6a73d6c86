"""Starting a private agent for a job on this node, once, whichever rank comes first.

The agent's socket has an abstract name made of uid, job and node, so that all local ranks know it and nothing is left
behind. A second abstract name is the lock: the kernel frees it when its holder dies, however that happens.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from allreduced.client.environment import AgentSettings, Launch
from allreduced.client.processes import process_identity
from allreduced.client.waiting import Procedure, Wait
from allreduced.core.addresses import SocketAddress
from allreduced.core.errors import AgentUnavailable, AllReducedError, from_wire

START_SECONDS = 60.0
"""How long a private agent may take to become ready: a cold file system, a busy machine."""

END_SECONDS = 1.0
"""How long an agent that said why it cannot start, or said nothing more, may take to end by itself."""

_started: dict[int, str] = {}
"""Private agents that this process started, with their identities. One that ended is a zombie until it is asked for."""

_READY_FD = 3
_LONGEST_ANSWER = 64 << 10


@dataclass(frozen=True, slots=True)
class PrivateAgent:
    """The private agent of a job on this node: where it listens, and how it is started."""

    socket: SocketAddress
    node: str
    join: str | None

    def command(self, ready: int = _READY_FD) -> list[str]:
        """Return the command that starts it; it reports on the descriptor ``ready``."""
        command = [sys.executable, "-P", "-m", "allreduced.cli.main", "agent", "--private"]
        command += ["--socket", str(self.socket), "--ready-fd", str(ready), "--node", self.node]
        if self.join is not None:
            command += ["--join", self.join]
        return command


def private_agent(launch: Launch, settings: AgentSettings, *, uid: int, host: str) -> PrivateAgent:
    """Return the private agent of the job on this node. Nodes that one machine only plays have one each.

    It is called as the settings say, which a certificate is for, or else by host and number of the node.

    :raises AgentUnavailable: the job spans several nodes and nothing says where their agents meet.
    """
    digest = hashlib.sha256(launch.job.encode()).hexdigest()[:16]
    several = not launch.one_node
    if several and settings.join is None:
        raise AgentUnavailable(
            f"the job spans several nodes ({launch.local_size} of {launch.size} ranks are here), "
            "and nothing says where their private agents meet",
            hint="set ALLREDUCED_JOIN=host:port, or MASTER_ADDR and MASTER_PORT, the same on all nodes",
        )
    part = f"-{launch.node_rank}" if several and launch.node_rank is not None else ""
    return PrivateAgent(
        socket=SocketAddress(f"@allreduced-{uid}-{digest}{part}"),
        node=settings.node or f"{host}{part}",
        join=settings.join if several else None,
    )


class Lock:
    """A lock between the processes of this machine: a bound abstract socket, freed by the kernel at the latest."""

    def __init__(self, name: SocketAddress) -> None:
        self._name = name
        self._socket: socket.socket | None = None

    def acquire(self) -> bool:
        """Return True if this process now has the lock, False if another has it."""
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            holder.bind(f"{self._name.sockaddr}-lock")
        except OSError as error:
            holder.close()
            if error.errno == errno.EADDRINUSE:
                return False
            raise AgentUnavailable(f"the lock for the private agent cannot be taken: {error}") from error
        self._socket = holder
        return True

    @property
    def held(self) -> bool:
        """True while this process has the lock."""
        return self._socket is not None

    def release(self) -> None:
        """Give the lock back, if this process has it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def start(command: Sequence[str], *, until: float) -> Procedure[None]:
    """Start an agent and wait until it is ready to serve.

    It runs in a session of its own and outlives this process where other ranks still need it.

    :raises AgentUnavailable: it did not become ready by ``until``.
    :raises AllReducedError: what the agent itself said was wrong, such as missing or wrong secrets.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        try:
            pid = os.posix_spawn(
                command[0],
                list(command),
                os.environ,
                setsid=True,
                file_actions=(
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
                    *((os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in _inheritable()),
                    (os.POSIX_SPAWN_DUP2, writer, _READY_FD),
                ),
            )
        except OSError as error:
            raise AgentUnavailable(f"the private agent cannot be started: {command[0]}: {error.strerror}") from error
        finally:
            os.close(writer)
        try:
            answer = yield from _read_line(reader, until)
        except BaseException:
            # Nobody waits for it any more: it must not live on, unknown to all.
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            raise
    finally:
        os.close(reader)
    yield from _judge(answer, pid)
    _reap()  # now: one that was killed just before may have taken a while to end
    _started[pid] = process_identity(pid)


def _reap() -> None:
    """Let the kernel forget the agents that ended; after a fork they are the parent's, and never asked for again."""
    for pid, identity in tuple(_started.items()):
        # Where the caller's own handler of SIGCHLD was first, the number may be that of another child by now.
        ended = pid
        if process_identity(pid) == identity:
            with contextlib.suppress(ChildProcessError):
                ended, _ = os.waitpid(pid, os.WNOHANG)
        if ended:
            del _started[pid]


def _inheritable() -> list[int]:
    """Return the descriptors that a child would get, but for the standard ones.

    The agent outlives this process: whoever waits for the end of a pipe of ours must not wait for the agent. Left out
    are those that were opened before the limit was lowered: the system refuses to hear of them.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = []
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208  # its own descriptor is closed when it returns
        with contextlib.suppress(OSError):
            if 2 < int(entry) < limit and os.get_inheritable(int(entry)):
                found.append(int(entry))
    return found


def check_installed() -> None:
    """Return if this installation has what an agent needs.

    :raises AgentUnavailable: it has not; the hint says how to get it.
    """
    hint = "install it with: pip install 'allreduced[agent]'; or name a running agent with ALLREDUCED_SOCKET"
    if not sys.executable:
        raise AgentUnavailable("a private agent cannot be started: sys.executable is empty", hint=hint)
    for module in ("msgspec",):
        if importlib.util.find_spec(module) is None:
            raise AgentUnavailable(f"a private agent cannot be started: {module} is not installed", hint=hint)


def _read_line(reader: int, until: float) -> Procedure[bytes]:
    """Return what the agent wrote up to the end of its line, or of its life (then without newline).

    :raises AgentUnavailable: neither came by ``until``.
    """
    answer = b""
    while not answer.endswith(b"\n") and len(answer) < _LONGEST_ANSWER:
        try:
            piece = os.read(reader, 4096)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise AgentUnavailable(
                    "the private agent was not ready in time", hint="see what it wrote to stderr; is the machine busy?"
                ) from None
            yield Wait(reader, write=False, until=until)
            continue
        if not piece:
            break
        answer += piece
    return answer


def _judge(answer: bytes, pid: int) -> Procedure[None]:
    """Return if the agent is ready; else reap or stop it, and raise what it said."""
    try:
        said: object = json.loads(answer) if answer.endswith(b"\n") else None
    except ValueError:
        said = None
    if isinstance(said, dict) and said.get("ready") is True:
        return
    status = yield from _end(pid)
    error = said.get("error") if isinstance(said, dict) else None
    if isinstance(error, list):
        raise _told(error)
    how = f"status {status}" if status >= 0 else f"signal {-status}"
    raise AgentUnavailable(
        f"the private agent did not start ({how})",
        hint="see what it wrote to stderr; `allreduced agent --private --socket @try` shows it alone",
    )


def _told(error: list[object]) -> AllReducedError:
    padded = [*error, "", "", "", {}][:4]
    code, message, hint, facts = padded
    if not isinstance(code, str) or not isinstance(message, str) or not isinstance(hint, str):
        return AgentUnavailable(f"the private agent did not start: {error!r:.500}")
    return from_wire((code, message, hint, facts if isinstance(facts, dict) else {}))


def _end(pid: int) -> Procedure[int]:
    """Return the exit status of an agent that failed to start; stop it if it does not end by itself."""
    until = time.monotonic() + END_SECONDS
    try:
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= until:
                os.kill(pid, signal.SIGKILL)
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            yield Wait(-1, write=False, until=min(until, time.monotonic() + 0.01))
    except ChildProcessError:
        return 0  # reaped by the caller's own handler of SIGCHLD
