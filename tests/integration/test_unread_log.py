"""Agents whose log nobody reads: they work and end as others do, and the log is there when it is read again."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.integration.agents import AgentProcess, NotStarted, StartAgent
from tests.integration.test_agent import BOUND, LOOPBACK, group
from tests.integration.test_metrics import scrape, value
from tests.integration.test_status import status
from tests.support.unread import full_pipe, read_rest

INFO = {"ALLREDUCED_AGENT_LOG_LEVEL": "info"}

UNREAD = """
import os, sys
os.dup2(int(sys.argv[1]), 2)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Makes a descriptor standard error, and starts the command behind it."""

NARROW = """
import functools, os, sys
from allreduced.cli.main import main
from allreduced.daemon import logs
os.dup2(int(sys.argv[1]), 2)
logs.LineWriter = functools.partial(logs.LineWriter, most=int(sys.argv[2]))
sys.exit(main(sys.argv[7:]))
"""
"""The same, in one process, for an agent that lets fewer characters wait."""

JOURNALLED = """
import functools, os, sys
from allreduced.cli.main import main
from allreduced.daemon import logs
found = os.fstat(2)
os.environ["JOURNAL_STREAM"] = f"{found.st_dev}:{found.st_ino}"
logs.Journal = functools.partial(logs.Journal, path=sys.argv[1])
sys.exit(main(sys.argv[6:]))
"""
"""For an agent whose standard error is that of a journal, which listens at a path of ours."""


async def sums(agents: Sequence[AgentProcess], job: str, size: int = 4) -> list[float]:
    """Return what each rank of a job got, whose sum is 0 + 1 + 2 + … ."""
    async with asyncio.timeout(BOUND), group(agents, size, job=job) as ranks:
        results = await asyncio.gather(*(rank.all_reduce(np.full(100_000, rank.rank, "float32")) for rank in ranks))
    assert all(np.all(result == result[0]) for result in results)
    return [float(result[0]) for result in results]


def events(log: str) -> list[str]:
    return [line.partition(" event=")[2].split(" ")[0] for line in log.splitlines() if " event=held_up " not in line]


async def test_agents_whose_standard_error_nobody_reads_work_and_end(start_agent: StartAgent) -> None:
    reading, writing, filled = full_pipe()
    unread = {"prefix": (sys.executable, "-c", UNREAD, str(writing)), "pass_fds": (writing,)}
    a = start_agent("a", *LOOPBACK, **unread, **INFO)
    b = start_agent("b", *LOOPBACK, "--join", a.listen.removeprefix("tcp://"), **unread, **INFO)
    os.close(writing)
    for number in range(3):
        assert await sums((a, b), f"job{number}") == [6.0] * 4
    for agent in (a, b):
        view = await asyncio.to_thread(status, agent)
        assert (sorted(one.node for one in view.agents), view.unanswered) == (["a", "b"], ())
    assert [agent.stop() for agent in (a, b)] == [0, 0]
    assert len(read_rest(reading)) == filled  # nobody took more, and nobody waited for that


async def test_the_log_comes_in_order_when_it_is_read_again_and_tells_what_is_lost(
    start_agent: StartAgent, free_port: int
) -> None:
    reading, writing, filled = full_pipe()
    most = 6000
    narrow = (sys.executable, "-c", NARROW, str(writing), str(most))
    metrics = {"ALLREDUCED_METRICS_LISTEN": f"127.0.0.1:{free_port}"}
    agent = start_agent("a", *LOOPBACK, prefix=narrow, pass_fds=(writing,), **INFO, **metrics)
    os.close(writing)
    for number in range(50):  # more lines than may wait, and fewer than the log's own limit leaves out
        assert await sums([agent], f"job{number}", size=1) == [0.0]
    text = os.read(reading, filled)
    while b" event=log_lines_lost " not in text or not text.endswith(b"\n"):
        text += os.read(reading, filled)
    assert await sums([agent], "later", size=1) == [0.0]
    lost = value(await asyncio.to_thread(scrape, free_port), "allreduced_log_lines_lost_total")
    assert agent.stop() == 0
    log = (text + read_rest(reading))[filled:].decode()
    assert events(log)[0] == "metrics_ready"
    at = events(log).index("log_lines_lost")
    kept = [line for line in log.splitlines() if " event=held_up " not in line]
    assert kept[at].endswith(f" WARNING node=a allreduced.log event=log_lines_lost lines={lost:.0f}")
    assert sum(map(len, kept[:at])) < most
    started = [line.partition(" job=")[2].split(" ")[0] for line in kept if " event=group_started " in line]
    assert started == [*(f"job{number}" for number in range(len(started) - 1)), "later"]
    assert lost >= 51 - len(started) > 0
    assert events(log)[-1] == "stopping"


def test_an_agent_that_cannot_start_ends_though_nobody_reads_why(start_agent: StartAgent) -> None:
    reading, writing, filled = full_pipe()
    unread = {"prefix": (sys.executable, "-c", UNREAD, str(writing)), "pass_fds": (writing,)}
    with pytest.raises(NotStarted) as caught:
        start_agent("a", **unread, ALLREDUCED_AGENT_LOG_LEVEL="loud")
    assert "LOG_LEVEL" in str(caught.value.error)
    assert caught.value.status == 2
    with pytest.raises(NotStarted) as caught:
        start_agent("a", "--listen", "tcp://192.0.2.1:4123", **unread, ALLREDUCED_INSECURE="1")
    assert caught.value.status == 2
    os.close(writing)
    assert len(read_rest(reading)) == filled


def test_a_second_signal_ends_an_agent_at_once_though_nobody_reads(start_agent: StartAgent) -> None:
    reading, writing, _ = full_pipe()
    unread = {"prefix": (sys.executable, "-c", UNREAD, str(writing)), "pass_fds": (writing,)}
    agent = start_agent("a", **unread)
    os.close(writing)
    agent.process.send_signal(signal.SIGSTOP)  # both come at once
    agent.process.send_signal(signal.SIGTERM)
    agent.process.send_signal(signal.SIGINT)
    agent.process.send_signal(signal.SIGCONT)
    assert agent.wait() == 1
    os.close(reading)


def full_journal(path: Path) -> tuple[socket.socket, int]:
    """Return a journal whose queue is full, and how many datagrams are in it."""
    journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    journal.bind(str(path))
    filled = 0
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            before = filled
            try:
                while True:
                    sender.sendto(b"x", str(path))
                    filled += 1
            except BlockingIOError:
                if filled == before:  # it is the journal that is full, and not the sender
                    return journal, filled
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise


async def test_an_agent_works_while_the_journal_is_stopped(start_agent: StartAgent, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, filled = full_journal(path)
    with journal:
        agent = start_agent("a", prefix=(sys.executable, "-c", JOURNALLED, str(path)), **INFO)
        for number in range(20):
            assert await sums([agent], f"job{number}", size=1) == [0.0]
        journal.settimeout(BOUND)
        assert [journal.recv(10) for _ in range(filled)] == [b"x"] * filled
        entries: list[bytes] = []
        while sum(b"\nALLREDUCED_EVENT=group_ended\n" in entry for entry in entries) < 20:
            entries.append(journal.recv(1 << 16))
        started = [entry for entry in entries if b"\nALLREDUCED_EVENT=group_started\n" in entry]
        jobs = [entry.partition(b"\nALLREDUCED_JOB=")[2].partition(b"\n")[0].decode() for entry in started]
        assert jobs == [f"job{number}" for number in range(20)]
        assert agent.stop() == 0
    assert agent.logged() == ""  # standard error is for what the journal refuses


async def test_an_agent_ends_while_the_journal_is_stopped(start_agent: StartAgent, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, filled = full_journal(path)
    with journal:
        agent = start_agent("a", prefix=(sys.executable, "-c", JOURNALLED, str(path)), **INFO)
        assert await sums([agent], "job", size=1) == [0.0]
        assert agent.stop() == 0
        journal.setblocking(False)
        for _ in range(filled):
            assert journal.recv(10) == b"x"
