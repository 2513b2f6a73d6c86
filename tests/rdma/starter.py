"""Starts the processes of a cluster in the guest: out of the nursery, so that a start costs no imports."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import IO, Final

from tests.chaos.cluster import Starter
from tests.integration.agents import AgentProcess, when_ready
from tests.rdma.nursery import Copy, Nursery, abstract_socket, clean_environment

START_SECONDS: Final = 150.0
"""Until an agent is ready. In the guest on a busy machine that is slow; it is a second otherwise."""


class FromNursery(Starter):
    """Forks agents and ranks. There are no prefixes: all nodes of the guest are one machine.

    ``own``: variables of the agents of single nodes, by name. ``memlock``: the agents may lock so many bytes only, and
    files count for them by their permissions. ``main``: what an agent calls with its command line.
    """

    def __init__(
        self,
        nursery: Nursery,
        own: Mapping[str, Mapping[str, str]] | None = None,
        *,
        memlock: int | None = None,
        main: str = "allreduced.cli.main:main",
    ) -> None:
        self._nursery = nursery
        self._own = own or {}
        self._confined = () if memlock is None else (f"memlock={memlock}",)
        self._main = main if memlock is None else "tests.rdma.confined:agent"

    def agent(
        self,
        node: str,
        arguments: tuple[str, ...],
        environment: dict[str, str],
        log: IO[bytes],
        prefix: tuple[str, ...] = (),
    ) -> AgentProcess:
        """See Starter."""
        del prefix
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as ready:
            words = (
                *self._confined,
                "agent",
                "--node",
                node,
                "--socket",
                abstract_socket(),
                "--ready-fd",
                "3",
                *arguments,
            )
            variables = {**clean_environment(), **environment, **self._own.get(node, {})}
            try:
                process = self._nursery.start(self._main, words, variables, log, passed=[writing])
            finally:
                os.close(writing)
            return when_ready(node, process, ready, log, START_SECONDS)

    def rank(self, log: IO[bytes], prefix: tuple[str, ...] = ()) -> Copy:
        """See Starter."""
        del prefix
        return self._nursery.start("tests.chaos.rank:main", (), clean_environment(), log, pipes=True)
