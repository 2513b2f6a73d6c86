"""Three nodes as containers, ranks beside them, and what happens to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.docker.project import NODES, Project, Rank

RANKS_PER_NODE = 2
SIZE = RANKS_PER_NODE * len(NODES)
SUM = SIZE * (SIZE + 1) / 2

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def ranks(project: Project) -> Iterator[list[Rank]]:
    """Return six ranks that reduce, two beside each of three agents."""
    project.compose("up", "--no-build", "--detach", *(f"agent-{node}" for node in NODES))
    for node in NODES:
        project.wait_until_serving(f"agent-{node}")
    started = [
        project.start_rank(rank, NODES[rank // RANKS_PER_NODE], size=SIZE, local_size=RANKS_PER_NODE)
        for rank in range(SIZE)
    ]
    for rank in started:
        assert rank.result(SUM) == {"value": SUM, "same": True, "size": SIZE}
    yield started
    started[0].ask_to_stop()
    assert [rank.wait() for rank in started] == [0] * SIZE
    project.compose("stop", "--timeout", "30")
    for node in NODES:
        assert project.exit_code(f"agent-{node}") == 0, project.logs(f"agent-{node}")
        assert "Traceback" not in project.logs(f"agent-{node}")


def test_a_killed_agent_is_named_and_the_job_goes_on_when_it_is_started_again(
    project: Project, ranks: list[Rank]
) -> None:
    agent = project.container("agent-b")
    project.docker.run("kill", agent)
    assert project.exit_code("agent-b") == 137
    for rank in ranks:
        error = rank.error()
        if rank.node == "b":
            assert error["error"] == "agent_unavailable", error
        else:
            assert (error["error"], error["nodes"]) == ("peer_lost", ["node-b"]), error
            assert error["ranks"] == [2, 3]
    project.docker.run("start", agent)
    for rank in ranks:
        rank.result(SUM)
    assert "event=peer_lost peer=node-b" in project.logs("agent-a")


def test_a_node_without_network_is_named_and_the_job_goes_on_when_it_is_back(
    project: Project, ranks: list[Rank]
) -> None:
    agent = project.container("agent-b")
    project.docker.run("network", "disconnect", project.network, agent)
    for rank in ranks:
        error = rank.error()
        if rank.node == "b":
            assert error["error"] in ("peer_lost", "group_changed"), error
        else:
            assert (error["error"], error["nodes"]) == ("peer_lost", ["node-b"]), error
    project.docker.run("network", "connect", "--alias", "agents", project.network, agent)
    for rank in ranks:
        rank.result(SUM)
    assert project.inspect("agent-b")["RestartCount"] == 0
    assert "event=peer_lost peer=node-b" in project.logs("agent-c")
