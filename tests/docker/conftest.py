"""A Docker daemon, the images, and the rule that a test leaves no container, network or volume behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docker.images import BASE, BUILD, ROOT, import_bases, make_context
from tests.docker.project import AGENT, DEMO, Project
from tests.support.debian import NotPermitted
from tests.support.docker import Docker, docker_daemon


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """Return a daemon: the machine's own, or one for these tests. Skips where there can be none."""
    directory = Path(tempfile.mkdtemp(prefix="allreduced-docker-"))  # short: a socket is in it
    try:
        with docker_daemon(directory) as daemon:
            yield daemon
    except NotPermitted as reason:
        pytest.skip(str(reason))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def compose_file(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Build the images by docker/Dockerfile; return the compose file that did so, in a copy of the source.

    With KEEP_IMAGES=1 and a daemon that runs anyway, images are kept, and those that are there used as they are.
    """
    directory = tmp_path_factory.mktemp("context")
    images, keep = (AGENT, DEMO, BUILD, BASE), bool(os.environ.get("KEEP_IMAGES"))
    if keep and docker.attempt("image", "inspect", *images).returncode == 0:
        yield ROOT / "docker" / "compose.yaml"
        return
    try:
        try:
            import_bases(docker)
            file = make_context(directory / "source")
        except NotPermitted as reason:
            pytest.skip(str(reason))
        Project(docker, file).compose("build", "agent-a", "trainer-a0", seconds=1500.0)
        yield file
    finally:
        if not keep:
            docker.attempt("image", "rm", "--force", *images)
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def project(docker: Docker, compose_file: Path) -> Iterator[Project]:
    """Return the compose project, of which nothing runs yet, and of which nothing is left afterwards."""
    made = Project(docker, compose_file)
    try:
        yield made
    finally:
        made.remove()


@pytest.fixture(autouse=True)
def nothing_left_behind(docker: Docker) -> Iterator[None]:
    """Fail a test that leaves something in the daemon behind. Its processes are the daemon's, and not looked at."""
    before = _everything(docker)
    yield
    left = _everything(docker) - before
    assert not left, f"left behind: {left}"


def _everything(docker: Docker) -> set[str]:
    containers = docker.run("ps", "--all", "--format", "container {{.Names}}")
    networks = docker.run("network", "ls", "--format", "network {{.Name}}")
    volumes = docker.run("volume", "ls", "--format", "volume {{.Name}}")
    return {*containers.splitlines(), *networks.splitlines(), *volumes.splitlines()}
