from __future__ import annotations

from allreduced.cli.job import Job, agent_command, agent_environment, rank_environment

JOB = Job(
    command=("python", "train.py"),
    nodes=3,
    ranks_per_node=2,
    agent_arguments=("--config=a.toml",),
    environment={"X": "1"},
    name="run-1",
)


def test_a_job_survives_its_trip_to_the_supervisor() -> None:
    assert Job.from_json(JOB.to_json()) == JOB


def test_two_jobs_never_share_a_name() -> None:
    assert Job(command=("a",)).name != Job(command=("a",)).name


def test_ranks_are_dealt_out_in_order() -> None:
    assert [JOB.node_of(rank) for rank in range(JOB.size)] == [0, 0, 1, 1, 2, 2]


def test_a_rank_is_told_who_it_is_in_both_languages() -> None:
    environment = rank_environment(JOB, 3, 4711, {"PATH": "/bin", "RANK": "77", "ALLREDUCED_SECRET": "outer"})
    cores_per_rank = environment.pop("OMP_NUM_THREADS")
    assert int(cores_per_rank) >= 1
    assert environment == {
        "PATH": "/bin",
        "X": "1",
        "PYTHONUNBUFFERED": "1",
        "ALLREDUCED_AGENT": "require",
        "ALLREDUCED_JOB": "run-1",
        "ALLREDUCED_RANK": "3",
        "ALLREDUCED_SIZE": "6",
        "ALLREDUCED_LOCAL_RANK": "1",
        "ALLREDUCED_LOCAL_SIZE": "2",
        "ALLREDUCED_NODE": "1",
        "ALLREDUCED_NODES": "3",
        "ALLREDUCED_SOCKET": "@allreduced-run-1-node1",
        "RANK": "3",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4711",
    }


def test_defaults_yield_to_the_callers_environment() -> None:
    environment = rank_environment(JOB, 0, 1, {"OMP_NUM_THREADS": "9", "PYTHONUNBUFFERED": ""})
    assert environment["OMP_NUM_THREADS"] == "9"
    assert environment["PYTHONUNBUFFERED"] == ""


def test_only_agents_know_the_secret_and_only_rank_0_the_channel() -> None:
    job = Job(command=("a",), ranks_per_node=2, channel=9)
    agent = agent_environment(job, "hush", {"ALLREDUCED_SOCKET": "outer", "HOME": "/h"})
    assert agent == {"HOME": "/h", "ALLREDUCED_SECRET": "hush"}
    first, second = (rank_environment(job, rank, 1, {}) for rank in range(2))
    assert "ALLREDUCED_SECRET" not in first
    assert first["ALLREDUCED_CHANNEL"] == "9"
    assert "ALLREDUCED_CHANNEL" not in second


def test_the_first_agent_listens_and_the_others_join_it() -> None:
    first = agent_command(JOB, 0, 5, join="")
    other = agent_command(JOB, 2, 6, join="127.0.0.1:4123")
    assert "--join" not in first
    assert other[-3:] == ("--join", "127.0.0.1:4123", "--config=a.toml")
    assert other[other.index("--socket") + 1] == "@allreduced-run-1-node2"
    assert other[other.index("--ready-fd") + 1] == "6"
