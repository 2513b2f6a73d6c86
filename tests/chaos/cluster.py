"""A cluster of real processes: agents, and ranks that form one group after the other."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar, Self

import psutil
from tests.chaos.network import Network
from tests.chaos.records import Record, parse
from tests.integration.agents import AgentProcess, Process, end_processes, start_process

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
LOG_LINES = 15
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""Agents end with the tests, also where these are killed."""


class Stuck(Exception):
    """Something did not happen in time; the text tells what all processes did last."""


@dataclass(frozen=True)
class Work:
    """What the ranks of a group do: steps of calls of these ``sizes`` in bytes, all within ``deadline`` seconds.

    ``mixed``: all collectives; else sums only, one of each size at a time.
    """

    sizes: tuple[int, ...]
    mixed: bool = True
    deadline: float = 60.0


class RankProcess:
    """A process that is a rank again and again."""

    def __init__(self, rank: int, process: Process) -> None:
        self.rank = rank
        self.process = process
        self._partial = b""

    def order(self, line: str) -> None:
        """Give it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def fileno(self) -> int:
        """Return the descriptor that it is heard on."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def hear(self) -> list[Record] | None:
        """Return what it has said; None when it has ended."""
        data = os.read(self.fileno(), 1 << 20)
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [parse(self.rank, line) for line in lines]

    def stop(self) -> int:
        """Let it end by itself; return its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(START_SECONDS)

    def end(self) -> None:
        """Kill it if it still runs."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Starter:
    """Starts the processes of a cluster."""

    def agent(
        self,
        node: str,
        arguments: tuple[str, ...],
        environment: dict[str, str],
        log: IO[bytes],
        prefix: tuple[str, ...],
    ) -> AgentProcess:
        """Start an agent; see ``start_process``."""
        return start_process(node, arguments, environment, log, prefix=(*prefix, *DIE_WITH_PARENT))

    def rank(self, log: IO[bytes], prefix: tuple[str, ...]) -> Process:
        """Start a rank, with pipes."""
        return subprocess.Popen(
            [*prefix, *DIE_WITH_PARENT, sys.executable, "-m", "tests.chaos.rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env=_environment() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )


class Cluster:
    """Agents on a network, and ranks at the ``places``: which node each of them is on.

    A context manager: entering starts all processes, leaving ends them whatever has happened to them.
    """

    start_seconds: ClassVar = START_SECONDS
    """Until a group is formed, or has ended."""

    def __init__(
        self, places: Sequence[int], network: Network, *, failure_timeout: float, starter: Starter | None = None
    ) -> None:
        self._starter = starter or Starter()
        self.places = tuple(places)
        self.nodes = max(places) + 1
        self.network = network
        self.failure_timeout = failure_timeout
        self.job = ""
        self.records: list[Record] = []
        """What was said in the group that there is, or was last."""
        self._jobs = 0
        self._logs: dict[str, IO[bytes]] = {}
        self._agents: dict[int, AgentProcess] = {}
        self._ranks: dict[int, RankProcess] = {}
        self._stopped: list[Process] = []
        self._stack = contextlib.ExitStack()
        self._selector = self._stack.enter_context(selectors.DefaultSelector())

    def __enter__(self) -> Self:
        self._stack.callback(self.network.close)
        self._stack.callback(self._end_all)
        try:
            self.mend()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def name(self, node: int) -> str:
        """Return the name of a node."""
        return f"node{node}"

    def ranks_of(self, node: int) -> frozenset[int]:
        """Return the ranks that are on a node."""
        return frozenset(rank for rank, place in enumerate(self.places) if place == node)

    def socket(self, node: int) -> str:
        """Return where the clients of a node's agent connect."""
        return self._agents[node].socket

    def logged(self, node: int) -> str:
        """Return what the agents of a node have logged so far."""
        return Path(self._log(self.name(node)).name).read_text()

    # Groups

    def form(self, work: Work) -> None:
        """Let all ranks form a new group and begin to work in it; return when each has made a step.

        :raises Stuck: they do not.
        """
        self._jobs += 1
        self.job = f"chaos-{self._jobs}"
        self.records.clear()
        for rank, process in self._ranks.items():
            order = {
                "job": self.job,
                "rank": rank,
                "size": len(self.places),
                "socket": self._agents[self.places[rank]].socket,
                "sizes": work.sizes,
                "mixed": work.mixed,
                "deadline": work.deadline,
            }
            process.order(json.dumps(order))
        self.wait(lambda: self.steps_since(0.0) >= 1 or self.over(), self.start_seconds, "all have made a step")
        if self.over():
            raise Stuck(self.report("the group has ended before there was a fault"))

    def finish(self) -> None:
        """Let the ranks agree to stop, and wait until all have left the group.

        :raises Stuck: they do not.
        """
        self._ranks[0].order("stop")
        everyone = frozenset(range(len(self.places)))
        self.wait(lambda: self.over() == everyone, self.start_seconds, "all have left the group")

    def steps_since(self, t: float) -> int:
        """Return how many steps every rank has made well that began after ``t``; the least of all ranks."""
        ends: dict[int, list[float]] = {rank: [] for rank in range(len(self.places))}
        for record in self.records:
            if record.event in ("step", "formed") and not record.errors and not record.wrong:
                ends[record.rank].append(record.t)
        return min(max(0, sum(end >= t for end in of_rank) - 1) for of_rank in ends.values())

    def over(self) -> frozenset[int]:
        """Return the ranks that have left the group, well or not."""
        return frozenset(record.rank for record in self.records if record.event == "over")

    # Time

    def wait(self, happened: Callable[[], object], seconds: float, what: str) -> None:
        """Listen until ``happened`` says so.

        :raises Stuck: it does not within ``seconds``.
        """
        if not self.listen(seconds, happened):
            raise Stuck(self.report(f"not within {seconds:g} s: {what}"))

    def listen(self, seconds: float, happened: Callable[[], object] = lambda: False) -> bool:
        """Take what ranks say for ``seconds``, or until ``happened``; return whether it has."""
        until = time.monotonic() + seconds
        while not happened():
            left = until - time.monotonic()
            if left <= 0:
                return False
            for key, _ in self._selector.select(left):
                process = key.fileobj
                assert isinstance(process, RankProcess)
                said = process.hear()
                if said is None:
                    self._selector.unregister(process)
                else:
                    self.records += [record for record in said if record.job in ("", self.job)]
        return True

    # Processes

    def descriptors(self) -> int:
        """Return how many descriptors the agent with the most of them has open."""
        return max(psutil.Process(agent.process.pid).num_fds() for agent in self._agents.values())

    def kill_agent(self, node: int) -> None:
        """Kill an agent."""
        self._agents.pop(node).kill()
        self.network.gone(node)

    def kill_rank(self, rank: int) -> None:
        """Kill a rank."""
        process = self._ranks.pop(rank)
        with contextlib.suppress(KeyError):
            self._selector.unregister(process)
        process.end()

    def stop_agent(self, node: int) -> None:
        """Stop an agent until :meth:`resume`."""
        self._stop(self._agents[node].process)

    def stop_rank(self, rank: int) -> None:
        """Stop a rank until :meth:`resume`."""
        self._stop(self._ranks[rank].process)

    def resume(self) -> None:
        """Let go on whatever was stopped."""
        for process in self._stopped:
            process.send_signal(signal.SIGCONT)
        self._stopped.clear()

    def mend(self) -> None:
        """Start what is not there."""
        for node in range(self.nodes):
            if node not in self._agents:
                self._start_agent(node)
        missing = [rank for rank in range(len(self.places)) if rank not in self._ranks]
        for rank in missing:
            prefix = self.network.prefix(self.places[rank])
            self._ranks[rank] = RankProcess(rank, self._starter.rank(self._log(f"rank{rank}"), prefix))
            self._selector.register(self._ranks[rank], selectors.EVENT_READ)

    def stop_all(self) -> list[int]:
        """Let ranks and agents end in order; return the exit statuses that are not 0."""
        statuses = [process.stop() for process in self._ranks.values()]
        statuses += [agent.stop() for agent in self._agents.values()]
        return [status for status in statuses if status]

    def _start_agent(self, node: int) -> None:
        agent = self._starter.agent(
            self.name(node),
            self.network.arguments(node),
            {
                "ALLREDUCED_FAILURE_FAILURE_TIMEOUT": str(self.failure_timeout),
                "ALLREDUCED_AGENT_LOG_LEVEL": "info",
                "ALLREDUCED_LIMITS_ARENA_BYTES": "1GiB",
                **self.network.environment(),
            },
            self._log(self.name(node)),
            self.network.prefix(node),
        )
        self._agents[node] = agent
        self.network.started(node, agent.listen)

    def _stop(self, process: Process) -> None:
        process.send_signal(signal.SIGSTOP)
        self._stopped.append(process)

    def _end_all(self) -> None:
        self.resume()
        for process in self._ranks.values():
            process.end()
        end_processes(list(self._agents.values()))

    # What went on

    def report(self, what: str) -> str:
        """Return ``what`` with the last words of all processes."""
        return "\n".join([what, *self._last_words()])

    def _last_words(self) -> Iterator[str]:
        for rank in range(len(self.places)):
            said = [record for record in self.records if record.rank == rank]
            status = self._ranks[rank].process.poll() if rank in self._ranks else "killed"
            yield f"rank {rank} on {self.name(self.places[rank])}: status {status}, {len(said)} lines, the last:"
            yield from (f"    {record}" for record in said[-2:])
        for label, log in sorted(self._logs.items()):
            lines = Path(log.name).read_text().splitlines()
            yield f"log of {label}:"
            yield from (f"    {line}" for line in lines[-LOG_LINES:])

    def _log(self, label: str) -> IO[bytes]:
        if label not in self._logs:
            file = tempfile.NamedTemporaryFile(prefix=f"pytest-{label}-", suffix=".log")  # noqa: SIM115 # by the stack
            self._logs[label] = self._stack.enter_context(file)
        return self._logs[label]


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("ALLREDUCED_", "XDG_RUNTIME"))}
