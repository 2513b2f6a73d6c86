"""``docker compose up``: the digits demo over three agents and six trainers, and its verdict."""

from __future__ import annotations

import pytest
from tests.docker.project import AGENT, NODES, Project

TRAINERS = tuple(f"trainer-{node}{rank}" for node in NODES for rank in (0, 1))
AGENTS = tuple(f"agent-{node}" for node in NODES)
UP = ("up", "--no-build", "--exit-code-from", "trainer-a0")

pytestmark = pytest.mark.timeout(1800)


def test_up_ends_with_the_verdict_of_the_training(project: Project) -> None:
    done = project.attempt(*UP)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    verdict = project.logs("trainer-a0")
    assert "ok    parameters are bit-identical on all 6 ranks" in verdict
    assert verdict.count("ok    ") == 3
    for service in TRAINERS:
        trainer = project.inspect(service)
        assert project.exit_code(service) == 0, (service, project.logs(service))
        # What it shares with its agent is the volume of the socket, and nothing else.
        assert (trainer["HostConfig"]["NetworkMode"], trainer["HostConfig"]["IpcMode"]) == ("none", "private")
        assert trainer["HostConfig"]["ShmSize"] == 64 << 20
        assert [mount["Destination"] for mount in trainer["Mounts"]] == ["/run/allreduced"]
    for service in AGENTS:
        log = project.logs(service)
        assert project.exit_code(service) == 0, (service, log)
        assert "event=stopping" in log
        assert "Traceback" not in log
        assert " ERROR " not in log


def test_a_training_that_fails_its_check_is_the_status_of_up(project: Project) -> None:
    done = project.attempt(*UP, environment={"EPOCHS": "1"})
    assert done.returncode == 1, done.stdout[-6000:] + done.stderr[-6000:]
    assert "FAIL  accuracy on " in project.logs("trainer-a0")


def test_without_a_secret_nothing_starts_and_the_way_out_is_told(project: Project) -> None:
    done = project.attempt("up", "--no-build", environment={"ALLREDUCED_SECRET": ""})
    assert done.returncode != 0
    assert "give the agents a secret" in done.stdout + done.stderr


def test_the_image_is_small_and_its_user_is_nobody_special(project: Project) -> None:
    docker = project.docker
    look = "id -u; command -v g++ c++ cc pip make; python -c 'import pip' 2>&1 | tail -1; ls -ld /run/allreduced"
    told = docker.run("run", "--rm", "--network=none", "--entrypoint=sh", AGENT, "-c", look).splitlines()
    assert told[:2] == ["10001", "ModuleNotFoundError: No module named 'pip'"]
    assert "allreduced allreduced" in told[2]
    assert "status" in docker.run("image", "inspect", "--format", "{{json .Config.Healthcheck.Test}}", AGENT)
    assert "\n[agent]\n" in docker.run("run", "--rm", "--network=none", AGENT, "agent", "--check")
