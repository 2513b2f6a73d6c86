"""Starts real agents, and ends them whatever happens."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import pytest
from tests.integration.agents import AgentProcess, StartAgent, end_processes, reserved_port, start_process


@pytest.fixture
def start_agent() -> Iterator[StartAgent]:
    """Return a function that starts an agent ``(node, *arguments, **environment)`` and waits until it is ready."""
    started: list[AgentProcess] = []
    with contextlib.ExitStack() as stack:

        def start(
            node: str,
            *arguments: str,
            prefix: tuple[str, ...] = (),
            pass_fds: tuple[int, ...] = (),
            **environment: str,
        ) -> AgentProcess:
            log = stack.enter_context(tempfile.NamedTemporaryFile(prefix=f"pytest-{node}-", suffix=".log"))
            agent = start_process(node, arguments, environment, log, prefix, pass_fds)
            started.append(agent)
            return agent

        stack.callback(end_processes, started)
        yield start


@pytest.fixture
def free_port() -> Iterator[int]:
    """Return a TCP port of the loopback interface that stays the test's own, and refuses until an agent listens."""
    with reserved_port() as port:
        yield port
