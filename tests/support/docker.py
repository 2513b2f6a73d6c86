"""A Docker daemon for tests: the machine's own where one runs, else one that leaves nothing behind.

The latter lives in network, mount and process namespaces of its own. Its bridges, packet filters and mounts are gone
with it, and its containers reach nothing outside; it dies with the tests, also when these are killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.debian import NotPermitted, install, need

START_SECONDS = 60.0
STOP_SECONDS = 30.0
COMMAND_SECONDS = 300.0

_TOOLS = {
    "dockerd": ("docker.io",),
    "docker": ("docker-cli", "docker.io"),
    "docker-init": ("tini", "docker.io"),
    "unshare": ("util-linux",),
    "setpriv": ("util-linux",),
    "ip": ("iproute2",),
}


class DockerError(Exception):
    """A command of Docker failed: its arguments, status and what it wrote."""


class Docker:
    """Commands to one daemon. ``host``: its address, as in ``DOCKER_HOST``; empty for the machine's own."""

    def __init__(self, host: str = "") -> None:
        self.environment = {**os.environ, **({"DOCKER_HOST": host} if host else {})}
        self.compose = _compose(self)
        """The command that runs Compose, version 2 where it is installed; empty where there is none."""

    def run(self, *arguments: str, seconds: float = COMMAND_SECONDS) -> str:
        """Run ``docker ARGUMENTS``; return its standard output without the last newline.

        :raises DockerError: it failed.
        """
        done = self.attempt(*arguments, seconds=seconds)
        if done.returncode != 0:
            raise DockerError(f"docker {shlex.join(arguments)}: status {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.rstrip("\n")

    def attempt(self, *arguments: str, seconds: float = COMMAND_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run ``docker ARGUMENTS``; return how it ended."""
        return self.command(("docker", *arguments), seconds=seconds)

    def command(
        self,
        command: tuple[str, ...],
        *,
        seconds: float = COMMAND_SECONDS,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run any command that speaks to this daemon, such as docker-compose; return how it ended."""
        return subprocess.run(
            command,
            env={**self.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=cwd,
            check=False,
        )


def _compose(docker: Docker) -> tuple[str, ...]:
    try:
        if docker.attempt("compose", "version").returncode == 0:
            return ("docker", "compose")
    except FileNotFoundError:
        return ()
    return ("docker-compose",) if shutil.which("docker-compose") else ()


@contextlib.contextmanager
def docker_daemon(directory: Path) -> Iterator[Docker]:
    """Yield a daemon that works. One that is started here has its data in ``directory``, and ends afterwards.

    :raises NotPermitted: there is none, and none can be started.
    """
    need(_TOOLS)
    own = Docker()
    if not own.compose:
        install(("docker-compose",), what="Docker Compose")  # a command in Debian 12, a plugin of docker's in Debian 13
        own = Docker()
        if not own.compose:
            raise NotPermitted("there is neither `docker compose` nor docker-compose")
    if own.attempt("version").returncode == 0:
        yield own
        return
    if os.geteuid() != 0:
        raise NotPermitted("no Docker daemon answers, and only root can start one")
    with _started(directory) as docker:
        yield docker


@contextlib.contextmanager
def _started(directory: Path) -> Iterator[Docker]:
    socket, log, cgroup = directory / "docker.sock", directory / "dockerd.log", f"allreduced-test-{os.getpid()}"
    reading, writing = os.pipe()
    daemon = [
        *("dockerd", f"--host=unix://{socket}", f"--data-root={directory}/data", f"--exec-root={directory}/exec"),
        *(f"--pidfile={directory}/dockerd.pid", "--bridge=none", f"--cgroup-parent=/{cgroup}"),
    ]
    script = f"ip link set lo up && exec docker-init -- {shlex.join(daemon)}"  # which takes care of orphans
    isolated = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script]
    with log.open("wb") as output, os.fdopen(reading, "rb") as ended:
        try:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *isolated],
                env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
            )
        finally:
            os.close(writing)
        docker = Docker(f"unix://{socket}")
        try:
            _wait_until_it_answers(docker, ended.fileno(), log)
            yield docker
        finally:
            _stop(process)
            for group in Path("/sys/fs/cgroup").glob(f"**/{cgroup}"):
                for below in sorted(group.glob("**/"), reverse=True):
                    with contextlib.suppress(OSError):
                        below.rmdir()
            for name in ("data", "exec"):
                shutil.rmtree(directory / name, ignore_errors=True)


def _wait_until_it_answers(docker: Docker, ended: int, log: Path) -> None:
    """Return when the daemon answers. ``ended``: a pipe that it holds open while it lives."""
    for _ in range(int(START_SECONDS / 0.25)):
        if docker.attempt("version").returncode == 0:
            return
        if select.select([ended], [], [], 0.25)[0]:
            break
    lines = log.read_text(errors="replace").strip().splitlines()
    raise NotPermitted(f"a Docker daemon cannot run here: {' / '.join(lines[-3:])}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the daemon in order, for it unmounts and removes what its containers had; by force if it must be."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)
