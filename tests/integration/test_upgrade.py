"""Agents are upgraded one at a time while a job runs: this version and the one before it work together."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.agents import AgentProcess, StartAgent, reserved_port

REPOSITORY = Path(__file__).parents[2]
ROOTS = ("core", "transports", "client", "daemon")
RANK = REPOSITORY / "tests" / "support" / "steady_rank.py"
BOUND = 60.0

PREVIOUS = "b81f3e7d15c6ecbe9fcad97232e7a38bd73fd51a"
"""The commit that stands for the version before; to be moved with every release."""

WITHOUT_SITE = "import os, sys; os.execv(sys.argv[1], [sys.argv[1], '-S', *sys.argv[2:]])"
"""An editable install would lead to this version's code, wherever PYTHONPATH points."""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the search path of the version before."""
    archive = subprocess.run(
        ["git", "-C", str(REPOSITORY), "archive", PREVIOUS, *ROOTS], capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"the version before is not in this clone: {archive.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("previous")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    native = importlib.util.find_spec("allreduced.daemon.kernels._native")
    assert native is not None
    assert native.origin is not None
    shutil.copy(native.origin, folder / "daemon" / "allreduced" / "daemon" / "kernels")
    return path_of(folder)


def path_of(folder: Path) -> str:
    return ":".join([*(str(folder / root) for root in ROOTS), *site.getsitepackages()])


class Node:
    """One of two nodes, whose agent can be of either version."""

    def __init__(self, name: str, start: StartAgent, folder: Path, own: int, other: str, others: int) -> None:
        self.socket = str(folder / f"{name}.sock")
        self._start = start
        self._name = name
        self._arguments = (
            *("--socket", self.socket, "--listen", f"tcp://127.0.0.1:{own}"),
            *("--peer", f"{other}=tcp://127.0.0.1:{others}"),
        )
        self._agent: AgentProcess | None = None

    def run(self, path: str | None) -> None:
        """Run an agent whose code lies at ``path``, or of this version; end the one that ran, in order."""
        if self._agent is not None:
            assert self._agent.stop() == 0
        if path is None:
            self._agent = self._start(self._name, *self._arguments)
        else:
            prefix = (sys.executable, "-c", WITHOUT_SITE)
            self._agent = self._start(self._name, *self._arguments, prefix=prefix, PYTHONPATH=path)
        maps = Path(f"/proc/{self._agent.process.pid}/maps").read_text()
        assert ("/previous" in maps) == (path is not None)  # by its native module it is what it should be

    def logged(self) -> str:
        assert self._agent is not None
        return self._agent.logged()


@contextlib.contextmanager
def ranks(nodes: list[Node], paths: list[str | None]) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a rank on each node, of this version's client or of the one at the path."""
    started = []
    try:
        for rank, (node, path) in enumerate(zip(nodes, paths, strict=True)):
            environ = dict(os.environ) | {"ALLREDUCED_SOCKET": node.socket}
            command = [sys.executable, "-P", str(RANK)]
            if path is not None:
                environ["PYTHONPATH"] = path
                command = [sys.executable, "-S", "-P", str(RANK)]
            command += map(str, (rank, len(nodes), 0, 1, 1 << 30))
            started.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=BOUND)


def line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


def went_on(rank: subprocess.Popen[str]) -> None:
    assert (told := line(rank)).startswith("lost "), told
    while (told := line(rank)).startswith("lost "):
        continue
    assert told == "3 3"


def measured(node: Node) -> dict[tuple[str, str], bool]:
    """Let the doctor measure all links. Return which ways were measured; all are there."""
    command = [sys.executable, "-m", "allreduced.cli.main", "doctor", "--bandwidth", "--json", "--socket", node.socket]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND, check=False)
    ways = json.loads(done.stdout)["ways"]
    assert {way["outcome"] for way in ways} <= {"reached", ""}, ways  # the version before does not dial when asked
    return {(way["source"], way["target"]): way["bandwidth"] > 0 for way in ways}


def test_agents_are_upgraded_one_at_a_time_under_a_running_job(
    start_agent: StartAgent, tmp_path: Path, previous: str
) -> None:
    with reserved_port() as one, reserved_port() as two:
        a = Node("a", start_agent, tmp_path, one, "b", two)
        b = Node("b", start_agent, tmp_path, two, "a", one)
        upgrade(a, b, previous)


def upgrade(a: Node, b: Node, previous: str) -> None:
    a.run(previous)
    b.run(previous)
    # The client of rank 0 is of this version, that of rank 1 of the one before: all four pairs come about.
    with ranks([a, b], [None, previous]) as started:
        assert [line(rank) for rank in started] == ["3 3", "3 3"]
        for node in (a, b):
            node.run(None)
            for rank in started:
                went_on(rank)
                assert rank.poll() is None
            if node is a:
                # What the version before does not know is not sent there: it would end the link.
                assert measured(a) == {("a", "b"): False, ("b", "a"): False}
                assert "event=bad_frame" not in b.logged()
                assert "event=link_lost" not in a.logged() + b.logged()
    assert "protocol" not in a.logged() + b.logged()
    assert measured(a) == {("a", "b"): True, ("b", "a"): True}
