"""The process that owns every process of a job: ``python -m allreduced.cli.supervisor LINK``.

``LINK`` is a socket to the front. The job arrives on it as one line; afterwards it only says that the front lives. When
the front is gone, also by SIGKILL, all descendants are killed. In the other direction the front, a subreaper too,
inherits and kills everything when this process is gone; and the kernel kills agents and ranks at once (death signal).

One thread, one poll loop. A job goes through the phases of :class:`Phase`, in order, and may skip some when it fails.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from allreduced.cli.console import MORE_FILES, OUT_OF_FILES
from allreduced.cli.job import Job, agent_command, agent_environment, node_name, rank_environment
from allreduced.cli.output import Streams
from allreduced.cli.processes import (
    FORWARDED,
    await_end,
    become_subreaper,
    describe_end,
    die_with_parent,
    kill_descendants,
    signal_name,
    status_of,
)

READY_TIMEOUT = 60.0
"""Seconds that agents may take from their start to the next ready line."""

STARTING_PER_CORE = 2
"""How many agents start at once: many more would all be slow, and none be ready in time."""

CAUSE_SECONDS = 1.0
"""Seconds that a process may take to end of which another one has failed; only the memory of it has to be freed."""

LONGEST_POLL = 3600.0
"""Seconds of one wait for whatever happens: the system counts no more than 24 days of milliseconds."""

FRONT_IS_GONE = 128 + signal.SIGKILL
OUTPUT_IS_GONE = 128 + signal.SIGPIPE


class Phase(enum.IntEnum):
    """Where a job stands."""

    FIRST_AGENT = 0
    OTHER_AGENTS = 1
    RANKS = 2
    STOP_AGENTS = 3
    DONE = 4


@dataclass(frozen=True, slots=True)
class _Child:
    """A process that the supervisor started. ``rank`` is -1 for agents."""

    process: subprocess.Popen[bytes]
    node: int
    rank: int = -1

    @property
    def label(self) -> str:
        """Return how messages call it."""
        return f"rank {self.rank} ({node_name(self.node)})" if self.rank >= 0 else f"agent {node_name(self.node)}"


class Supervisor:
    """Runs one job. ``link`` is the socket to the front, from which the job has been read already."""

    def __init__(self, job: Job, link: socket.socket) -> None:
        self._job = job
        self._link = link
        self._environment = dict(os.environ)
        self._secret = secrets.token_hex(32)
        self._phase = Phase.FIRST_AGENT
        self._children: dict[int, _Child] = {}
        self._unready: dict[int, int] = {}  # node to the descriptor of its ready line
        self._unstarted = deque(range(1, job.nodes))
        self._join = ""
        self._words: dict[int, bytes] = {}
        self._agents_ready = 0
        self._status = 0
        self._failed = False
        self._signal = 0
        self._interrupts = 0
        self._timer = time.monotonic() + READY_TIMEOUT
        self._selector = selectors.PollSelector()
        self._streams = Streams(self._selector)

    def run(self) -> int:
        """Run the job to its end and return its exit status. No process of it is left then."""
        self._watch()
        try:
            self._start_agent(0)
            while self._phase is not Phase.DONE:
                self._turn()
        finally:
            kill_descendants()
        self._streams.drain()
        self._write_the_rest()
        return self._status

    def _write_the_rest(self) -> None:
        """Wait for whoever reads the output: until a signal comes, or for the grace where one ended the job."""
        told, self._signal = self._signal, 0
        until = time.monotonic() + self._job.grace
        while self._streams.pending and not self._signal:
            before = self._streams.waiting
            self._poll(min(max(0.0, until - time.monotonic()), LONGEST_POLL) if told else None)
            if self._streams.waiting < before:  # somebody reads
                until = time.monotonic() + self._job.grace
            elif told and time.monotonic() >= until:
                return

    # Starting

    def _start_more_agents(self) -> None:
        at_once = STARTING_PER_CORE * len(os.sched_getaffinity(0))
        while self._unstarted and len(self._unready) < at_once and not self._failed:
            self._start_agent(self._unstarted.popleft())

    def _start_agent(self, node: int) -> None:
        """Start an agent; the job fails where that cannot be done."""
        reader = -1
        try:
            reader, writer = os.pipe()
            command = agent_command(self._job, node, writer, self._join)
            environment = agent_environment(self._job, self._secret, self._environment)
            try:
                self._start(command, environment, node, keep=(writer,))
            finally:
                os.close(writer)
        except OSError as error:
            if reader >= 0:
                os.close(reader)
            self._fail(1, f"cannot start agent {node_name(node)}: {error.strerror}", hint=_hint(error))
            return
        self._unready[node] = reader
        self._words[node] = b""
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._hear(node))

    def _start_ranks(self) -> None:
        self._phase = Phase.RANKS
        self._timer = 0.0
        port = _free_port()
        channel = self._job.channel
        for rank in range(self._job.size):
            environment = rank_environment(self._job, rank, port, self._environment)
            keep = (channel,) if rank == 0 and channel >= 0 else ()
            try:
                self._start(self._job.command, environment, self._job.node_of(rank), rank, keep=keep)
            except OSError as error:
                status = 127 if isinstance(error, FileNotFoundError) else 126
                self._fail(status, f"cannot start {self._job.command[0]!r}: {error.strerror}", hint=_hint(error))
                break
        if channel >= 0:
            os.close(channel)  # only rank 0 holds it now, so that the front sees its end

    def _start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        node: int,
        rank: int = -1,
        *,
        keep: tuple[int, ...],
    ) -> None:
        me = os.getpid()
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=keep,
            process_group=0,
            preexec_fn=lambda: _before_exec(me),  # safe: this process has one thread
        )
        self._children[process.pid] = _Child(process, node, rank)
        label = str(rank) if rank >= 0 else node_name(node)
        prefix = f"[{label}] ".encode() if self._job.prefix else b""
        out = self._streams.out if rank >= 0 else self._streams.err
        for pipe, sink in ((process.stdout, out), (process.stderr, self._streams.err)):
            if pipe is not None:
                self._streams.add(os.dup(pipe.fileno()), sink, prefix)
                pipe.close()

    # The loop

    def _watch(self) -> None:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        for number in (*FORWARDED, signal.SIGCHLD):
            signal.signal(number, lambda _number, _frame: None)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # not in the terminal's foreground, but it may write there
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # the front blocked them until somebody listens
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._on_signals(os.read(reader, 4096)))
        self._selector.register(self._link, selectors.EVENT_READ, self._on_front)

    def _turn(self) -> None:
        self._poll(min(max(0.0, self._timer - time.monotonic()), LONGEST_POLL) if self._timer else None)
        if self._streams.broken and not self._failed:
            self._fail(OUTPUT_IS_GONE, "nobody reads the output any more")
        if self._timer and time.monotonic() >= self._timer:
            self._on_time()

    def _poll(self, timeout: float | None) -> None:
        self._streams.arm()
        for key, _ in self._selector.select(timeout):
            # An earlier action of this round may have closed it.
            if key.fd in self._selector.get_map():
                action: Callable[[], object] = key.data
                action()

    def _on_front(self) -> None:
        if not self._link.recv(1):
            kill_descendants()
            os._exit(FRONT_IS_GONE)  # at once: nobody is left to hear anything

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                continue
            self._signal = number
            self._interrupts += number == signal.SIGINT
            if self._phase < Phase.RANKS:
                self._fail(128 + number, f"stopped by {signal_name(number)} before the ranks started")
            elif self._interrupts > 1:
                self._signal_all(signal.SIGKILL, ranks=self._phase is Phase.RANKS)
            elif self._phase is Phase.RANKS:
                self._signal_all(number, ranks=True)
        self._reap()

    def _reap(self) -> None:
        ended = list(self._collect())
        if not self._failed and any(child.rank >= 0 and wait_status for child, wait_status in ended):
            await_end(self._children, CAUSE_SECONDS)
            ended += self._collect()
        # Causes before effects: when an agent dies its ranks fail of it, and when a rank is killed the others do.
        for child, wait_status in sorted(ended, key=lambda item: (item[0].rank >= 0, not os.WIFSIGNALED(item[1]))):
            self._on_end(child, wait_status)

    def _collect(self) -> Iterator[tuple[_Child, int]]:
        """Yield the children that have ended, with their status for ``waitpid``."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                child = self._children.pop(pid, None)
                if child is not None:  # else an orphan that we inherited
                    child.process.returncode = os.waitstatus_to_exitcode(wait_status)
                    yield child, wait_status

    def _on_end(self, child: _Child, wait_status: int) -> None:
        if child.rank < 0 and child.node in self._unready:
            self._hear(child.node)  # its last words say why
        if self._failed:
            pass
        elif child.rank >= 0 and wait_status != 0:
            if self._signal:
                self._fail(128 + self._signal, f"stopped by {signal_name(self._signal)}", tell=False)
            else:
                others = "; the other ranks were stopped" if self._job.size > 1 else ""
                self._fail(status_of(wait_status), f"{child.label} {describe_end(wait_status)}{others}")
        elif child.rank < 0 and self._phase < Phase.STOP_AGENTS:
            self._fail(status_of(wait_status) or 1, f"{child.label} {describe_end(wait_status)}; the job was stopped")
        elif child.rank < 0 and wait_status != 0:
            self._tell(f"allreduced: warning: {child.label} {describe_end(wait_status)} while it was stopped")
        self._advance()

    # Phases

    def _hear(self, node: int) -> None:
        """Read what an agent says of its start: one line of JSON."""
        fd = self._unready[node]
        data = os.read(fd, 65536)
        self._words[node] += data
        if data and not data.endswith(b"\n"):
            return
        del self._unready[node]
        self._selector.unregister(fd)
        os.close(fd)
        words = self._words.pop(node)
        if not words:
            return  # it ended without a word; its exit status will say more
        said = json.loads(words)
        if "error" in said:
            _, message, hint = said["error"][:3]
            self._fail(1, f"agent {node_name(node)}: {message}", hint=hint)
            return
        self._agents_ready += 1
        if self._failed:
            return
        if self._phase is Phase.FIRST_AGENT:
            self._phase = Phase.OTHER_AGENTS
            self._join = str(said["listen"]).removeprefix("tcp://")
        self._timer = time.monotonic() + READY_TIMEOUT
        self._start_more_agents()
        if self._agents_ready == self._job.nodes and not self._failed:
            self._start_ranks()

    def _fail(self, status: int, reason: str, *, hint: str = "", tell: bool = True) -> None:
        """Note the first failure, and stop all ranks: SIGTERM now unless ``tell`` is false, SIGKILL after the grace."""
        if self._failed:
            return
        self._failed = True
        self._status = status
        self._tell(f"allreduced: error: {reason}" + (f"\n  hint: {hint}" if hint else ""))
        self._timer = time.monotonic() + self._job.grace
        if self._phase < Phase.RANKS:
            self._phase = Phase.RANKS
        if tell:
            self._signal_all(signal.SIGTERM, ranks=True)
        self._advance()

    def _tell(self, text: str) -> None:
        self._streams.err.put(text.encode() + b"\n")

    def _advance(self) -> None:
        """Go on to the next phase where nothing of this one is left."""
        if self._phase is Phase.RANKS and not any(child.rank >= 0 for child in self._children.values()):
            self._phase = Phase.STOP_AGENTS
            self._timer = time.monotonic() + self._job.grace
            self._signal_all(signal.SIGTERM, ranks=False)
        if self._phase is Phase.STOP_AGENTS and not self._children:
            self._phase = Phase.DONE

    def _on_time(self) -> None:
        self._timer = 0.0
        if self._phase < Phase.RANKS:
            self._fail(1, f"an agent was not ready within {READY_TIMEOUT:g} s")
        else:
            self._signal_all(signal.SIGKILL, ranks=self._phase is Phase.RANKS)

    def _signal_all(self, number: int, *, ranks: bool) -> None:
        """Send a signal to the process groups of the ranks, or of the agents."""
        for pid, child in self._children.items():
            if (child.rank >= 0) is ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the front describes on the descriptor named by the first argument."""
    arguments = sys.argv[1:] if argv is None else argv
    with socket.socket(fileno=int(arguments[0])) as link:
        os.set_inheritable(link.fileno(), False)
        become_subreaper()
        with link.makefile("rb") as lines:
            line = lines.readline()
        if not line:
            return FRONT_IS_GONE
        job = Job.from_json(line)
        if job.channel >= 0:
            os.set_inheritable(job.channel, False)
        return Supervisor(job, link).run()


def _hint(error: OSError) -> str:
    if error.errno in OUT_OF_FILES:
        return MORE_FILES
    return ""


def _before_exec(parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)  # ignored signals would stay ignored


def _free_port() -> int:
    """Return a port that is free now, for the rendezvous of libraries that are told MASTER_PORT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
