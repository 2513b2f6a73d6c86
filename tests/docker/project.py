"""The project of docker/compose.yaml, as a test drives it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.docker.images import BASE, BUILD
from tests.support.docker import Docker, DockerError

AGENT, DEMO = "allreduced-test-agent", "allreduced-test-demo"
NODES = ("a", "b", "c")
RANK = Path(__file__).with_name("rank.py")

LINE_SECONDS = 90.0
"""How long a test waits for a line that must come."""

Facts = dict[str, Any]


class Project:
    """One run of the compose file, under a name of its own."""

    def __init__(self, docker: Docker, file: Path, **environment: str) -> None:
        self.docker = docker
        self._file = file
        self._name = f"allreducedtest{os.getpid()}"
        self._environment = {
            "ALLREDUCED_SECRET": "of the test",
            "AGENT_IMAGE": AGENT,
            "DEMO_IMAGE": DEMO,
            "BASE_IMAGE": BASE,
            "BUILD_IMAGE": BUILD,
            "PIP_ARGUMENTS": "--no-index",
            "BUILD_NETWORK": "none",  # a daemon of the tests has no bridge, which BuildKit would ask for
            "COMPOSE_PROJECT_NAME": self._name,
            **environment,
        }
        self._ranks: list[Rank] = []

    def compose(self, *arguments: str, seconds: float = 300.0) -> str:
        """Run a command of compose; return what it wrote.

        :raises DockerError: it failed.
        """
        done = self.attempt(*arguments, seconds=seconds)
        if done.returncode != 0:
            raise DockerError(
                f"compose {arguments}: status {done.returncode}: {done.stdout[-6000:]}{done.stderr[-6000:]}"
            )
        return done.stdout

    def attempt(
        self, *arguments: str, seconds: float = 300.0, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of compose; return how it ended."""
        return self.docker.command(
            (*self.docker.compose, "--file", str(self._file), *arguments),
            seconds=seconds,
            environment={**self._environment, **(environment or {})},
        )

    def container(self, service: str) -> str:
        """Return the id of the container of a service, running or not."""
        label = f"label=com.docker.compose.service={service}"
        project = f"label=com.docker.compose.project={self._name}"
        return self.docker.run("ps", "--all", "--quiet", "--filter", project, "--filter", label)

    def inspect(self, service: str) -> Facts:
        """Return what Docker knows of the container of a service."""
        (found,) = json.loads(self.docker.run("inspect", self.container(service)))
        return dict(found)

    def exit_code(self, service: str) -> int:
        """Return the exit status of a container that has ended."""
        state = self.inspect(service)["State"]
        assert state["Status"] == "exited", state
        return int(state["ExitCode"])

    def wait_until_serving(self, service: str) -> None:
        """Return once the agent of a service answers its clients."""
        until = time.monotonic() + LINE_SECONDS
        while (
            asked := self.docker.attempt("exec", self.container(service), "allreduced", "status", "--local")
        ).returncode:
            assert time.monotonic() < until, asked.stdout + asked.stderr + self.logs(service)

    def logs(self, service: str) -> str:
        """Return all that the container of a service wrote."""
        done = self.docker.attempt("logs", self.container(service))
        return done.stdout + done.stderr

    @property
    def network(self) -> str:
        """The name of the network that the agents share."""
        return f"{self._name}_nodes"

    def start_rank(self, rank: int, node: str, *, size: int, local_size: int) -> Rank:
        """Start a rank of the test's job beside the agent of ``node``, as a container of its own."""
        variables = {
            "ALLREDUCED_AGENT": "require",
            "ALLREDUCED_JOB": "test",
            "ALLREDUCED_RANK": rank,
            "ALLREDUCED_SIZE": size,
            "ALLREDUCED_LOCAL_RANK": rank % local_size,
            "ALLREDUCED_LOCAL_SIZE": local_size,
        }
        container = self.docker.run(
            *(
                "run",
                "--detach",
                "--network=none",
                "--read-only",
                f"--volume={self._name}_socket-{node}:/run/allreduced:ro",
            ),
            *(f"--env={name}={value}" for name, value in variables.items()),
            *("--entrypoint=python", DEMO, "-c", RANK.read_text()),
        )
        made = Rank(self.docker, container, rank, node)
        self._ranks.append(made)
        return made

    def remove(self) -> None:
        """Remove all containers, networks and volumes of this run."""
        for rank in self._ranks:
            rank.remove()
        label = f"label=com.docker.compose.project={self._name}"
        if self.docker.run("ps", "--all", "--quiet", "--filter", label) or self.docker.run(
            "network", "ls", "--quiet", "--filter", label
        ):
            self.compose("down", "--volumes", "--timeout", "1")


class Rank:
    """A container with a rank of the test's job. See ``rank.py`` for what it writes."""

    def __init__(self, docker: Docker, container: str, rank: int, node: str) -> None:
        self.rank = rank
        self.node = node
        self._docker = docker
        self._container = container
        self._data = b""
        self._output = subprocess.Popen(
            ["docker", "logs", "--follow", container],
            env=docker.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def next(self, wanted: Callable[[Facts], bool]) -> Facts:
        """Skip lines up to the first that is wanted, and return it."""
        until = time.monotonic() + LINE_SECONDS
        seen: list[str] = []
        assert self._output.stdout is not None
        while True:
            while b"\n" in self._data:
                line, _, self._data = self._data.partition(b"\n")
                seen.append(line.decode(errors="replace"))
                if line.startswith(b"{") and wanted(facts := json.loads(line)):
                    return dict(facts)
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._output.stdout], [], [], left)[0]:
                raise AssertionError(f"rank {self.rank} did not write what it must, but {seen[-20:]}")
            piece = os.read(self._output.stdout.fileno(), 65536)
            if not piece:
                raise AssertionError(f"rank {self.rank} ended, after {seen[-20:]}")
            self._data += piece

    def result(self, value: float) -> Facts:
        """Return the next result; it must be ``value``, whatever came before."""
        facts = self.next(lambda facts: "value" in facts)
        assert facts["value"] == value, (self.rank, facts)
        return facts

    def error(self) -> Facts:
        """Return the next error."""
        return self.next(lambda facts: "error" in facts)

    def ask_to_stop(self) -> None:
        """Tell it to end, in order."""
        self._docker.run("kill", "--signal=TERM", self._container)

    def wait(self) -> int:
        """Return its exit status once it has ended."""
        return int(self._docker.run("wait", self._container, seconds=LINE_SECONDS))

    def remove(self) -> None:
        """End and remove it."""
        self._docker.attempt("rm", "--force", self._container)
        self._output.wait()
        if self._output.stdout is not None:
            self._output.stdout.close()
