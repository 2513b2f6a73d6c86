from __future__ import annotations

import os
import subprocess
import sys

import pytest

from allreduced.client.environment import (
    Launch,
    first_host,
    parse_tasks_per_node,
    read_agent,
    read_launch,
)
from allreduced.client.processes import launcher_identity, process_identity
from allreduced.core.errors import ConfigError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run7",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "4",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}


def identify(telling: tuple[str, ...]) -> str:
    return f"L{len(telling)}"


def launch(environ: dict[str, str], **arguments: int | str) -> Launch:
    return read_launch(environ, launcher_id=identify, **arguments)  # type: ignore[arg-type]  # mixed keywords


def test_nobody_launched_us() -> None:
    found = launch({})
    assert (found.rank, found.size, found.local_rank, found.local_size, found.launcher) == (0, 1, 0, 1, "none")
    assert found.job == f"single-{process_identity(os.getpid())}"


def test_torchrun_on_several_nodes() -> None:
    assert launch(TORCHRUN) == Launch(
        "torchrun-run7-2-node0-29500", 3, 4, 1, 2, 1, 2, "node0", 29500, "torchrun", one_node=False
    )


def test_torchrun_on_one_node_is_told_apart_by_its_launcher() -> None:
    one = {**TORCHRUN, "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    assert launch(one).job == "torchrun-run7-2-node0-29500-L3"


def test_a_restart_of_torchrun_is_another_job() -> None:
    assert launch({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"}).job != launch(TORCHRUN).job


def test_slurm() -> None:
    found = launch(SLURM)
    assert found.job == "slurm-812.3.0"
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 7, 1, 2)
    assert (found.node_rank, found.nodes, found.master_addr, found.launcher) == (2, 4, "gpu07", "slurm")
    assert found.master_port is not None
    assert launch({**SLURM, "SLURM_RESTART_COUNT": "1"}).job == "slurm-812.3.1"
    assert launch({**SLURM, "SLURM_STEP_ID": "4"}).master_port != found.master_port


def test_a_shell_of_salloc_is_not_a_step() -> None:
    shell = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert launch(shell).launcher == "none"


def test_torchrun_inside_slurm_is_torchrun() -> None:
    assert launch({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_open_mpi() -> None:
    assert launch(OMPI) == Launch("ompi-prterun-host-77@1", 1, 2, 1, 2, None, 1, None, None, "openmpi")
    del (without := dict(OMPI))["PMIX_NAMESPACE"]
    assert launch(without).job == "ompi-L2"


def test_pmi() -> None:
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    assert launch(pmi) == Launch("pmi-L2", 1, 4, 1, 4, None, 1, None, None, "pmi")
    assert launch({**pmi, "PMI_JOBID": "x9"}).job == "pmi-x9"
    two_nodes = {**pmi, "MPI_LOCALNRANKS": "2"}
    with pytest.raises(ConfigError, match="no job id") as caught:
        launch(two_nodes)
    assert caught.value.path == "PMI_JOBID"
    assert launch(two_nodes, job="mine").job == "mine"


def test_our_own_launcher_beats_the_names_it_also_sets() -> None:
    own = {
        "ALLREDUCED_JOB": "run-1",
        "ALLREDUCED_RANK": "2",
        "ALLREDUCED_SIZE": "6",
        "ALLREDUCED_LOCAL_RANK": "0",
        "ALLREDUCED_LOCAL_SIZE": "2",
        "ALLREDUCED_NODE": "1",
        "ALLREDUCED_NODES": "3",
    }
    assert launch({**TORCHRUN, **own}) == Launch(
        "run-1", 2, 6, 0, 2, 1, 3, "node0", 29500, "allreduced", one_node=False
    )


def test_plain_variables() -> None:
    here = launch({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5000"})
    assert (here.job, here.local_rank, here.local_size) == ("env-127.0.0.1-5000", 1, 2)
    pod = launch({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master", "MASTER_PORT": "5000"})
    assert (pod.local_rank, pod.local_size, pod.one_node) == (0, 1, False)
    assert launch({"RANK": "0", "WORLD_SIZE": "2"}).job == "env-L2"


def test_a_group_of_some_ranks_still_belongs_to_the_whole_job() -> None:
    pair = launch(TORCHRUN, rank=1, size=2)
    assert (pair.job, pair.rank, pair.size, pair.local_size, pair.one_node) == (launch(TORCHRUN).job, 1, 2, 2, False)
    alone = launch(TORCHRUN, rank=0, size=1)
    assert (alone.local_rank, alone.local_size, alone.one_node) == (0, 1, False)


def test_rank_and_size_given_inside_slurm_keep_its_job() -> None:
    found = launch(SLURM, rank=0, size=4)
    assert (found.job, found.rank, found.size, found.node_rank) == ("slurm-812.3.0", 0, 4, 2)


def test_arguments_beat_variables() -> None:
    found = launch(TORCHRUN, job="j", rank=0, size=2, local_rank=0, local_size=2)
    assert (found.job, found.rank, found.size, found.local_rank, found.local_size) == ("j", 0, 2, 0, 2)
    alone = launch({}, rank=1, size=3)
    assert (alone.job, alone.local_rank, alone.local_size) == ("local-L0", 1, 3)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"RANK": "x"}, "RANK"),
        ({"RANK": "-1"}, "RANK"),
        ({"RANK": "4"}, "rank"),
        ({"RANK": "1" * 30}, "RANK"),
        ({"RANK": "٣"}, "RANK"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": "2"}, "local_rank"),
        ({"LOCAL_WORLD_SIZE": "5"}, "local_size"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT"),
    ],
)
def test_bad_values_name_their_variable(changes: dict[str, str], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        launch({**TORCHRUN, **changes})
    assert caught.value.path == path


def test_rank_without_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="size is not known"):
        launch({}, rank=2)
    with pytest.raises(ConfigError, match="rank is not known"):
        launch({}, size=2)
    with pytest.raises(ConfigError, match="size is 0"):
        launch({}, rank=0, size=0)


def test_slurm_that_contradicts_itself() -> None:
    with pytest.raises(ConfigError, match="SLURM_NODEID is 9"):
        launch({**SLURM, "SLURM_NODEID": "9"})


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x3),1", (2, 2, 2, 1)), ("4", (4,)), ("1,2,3", (1, 2, 3)), ("16(x2)", (16, 16))]
)
def test_tasks_per_node(text: str, counts: tuple[int, ...]) -> None:
    assert parse_tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(y3)", "2(x)", "-1", "2(x99999999)"])
def test_bad_tasks_per_node(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_tasks_per_node(text)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[07-09,12]", "gpu07"), ("a[3,5]b,c", "a3b"), ("r[1-2]n[4-5]", "r1n4")],
)
def test_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_which_agent() -> None:
    one = launch({})
    found = read_agent({"XDG_RUNTIME_DIR": "/run/user/7/"}, one, socket=None, agent=None)
    assert found.socket is None
    assert found.places == ("/run/user/7/allreduced/agent.sock", "/run/allreduced/agent.sock")
    assert not found.require
    environ = {"ALLREDUCED_SOCKET": "@a", "ALLREDUCED_AGENT": "require"}
    found = read_agent(environ, one, socket=None, agent=None)
    assert (str(found.socket), found.source, found.require) == ("@a", "ALLREDUCED_SOCKET", True)
    found = read_agent(environ, one, socket="/x/y", agent="auto")
    assert (str(found.socket), found.source, found.require) == ("/x/y", "socket", False)


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"ALLREDUCED_AGENT": "maybe"}, "ALLREDUCED_AGENT"),
        ({"ALLREDUCED_SOCKET": "@"}, "ALLREDUCED_SOCKET"),
        ({"ALLREDUCED_SOCKET": "/" + "x" * 200}, "ALLREDUCED_SOCKET"),
        ({"ALLREDUCED_JOIN": "host"}, "ALLREDUCED_JOIN"),
    ],
)
def test_bad_choice_of_agent(environ: dict[str, str], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_agent(environ, launch({}), socket=None, agent=None)
    assert caught.value.path == path


def test_where_private_agents_meet() -> None:
    assert read_agent({}, launch(TORCHRUN), socket=None, agent=None).join == "node0:29501"
    assert read_agent({"ALLREDUCED_JOIN": "h:7"}, launch(TORCHRUN), socket=None, agent=None).join == "h:7"
    assert read_agent({}, launch({}), socket=None, agent=None).join is None
    v6 = launch({**TORCHRUN, "MASTER_ADDR": "fd00::1"})
    assert read_agent({}, v6, socket=None, agent=None).join == "[fd00::1]:29501"
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        read_agent({}, launch({**TORCHRUN, "MASTER_PORT": "65535"}), socket=None, agent=None)


def test_the_launcher_is_found_behind_a_shell() -> None:
    code = "from allreduced.client.processes import launcher_identity as f; print(f(('T_RANK',)))"
    # The ranks of one launcher, one of them inside a shell: the shell has the rank's T_RANK, the launcher has not.
    direct = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "T_RANK": "0"}, capture_output=True, text=True, check=True
    )
    wrapped = subprocess.run(
        ["/bin/sh", "-c", f'"{sys.executable}" -c "{code}"; true'],
        env={**os.environ, "T_RANK": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert direct.stdout.strip() == wrapped.stdout.strip() == process_identity(os.getpid())
    assert launcher_identity(()) == process_identity(os.getppid())


@pytest.mark.parametrize(
    "environ", [{**TORCHRUN, "TORCHELASTIC_RUN_ID": "j\udcff"}, {**OMPI, "PMIX_NAMESPACE": "j\udcff"}]
)
def test_a_job_id_that_is_no_text_is_an_error_of_the_settings(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"the job id '.*j.udcff.*' is no UTF-8 .launcher: ") as caught:
        launch(environ)
    assert caught.value.path == "job"


@pytest.mark.parametrize("job", ["", "x" * 257, "ü" * 129])
def test_the_length_of_a_job_id_is_bounded_in_bytes(job: str) -> None:
    with pytest.raises(ConfigError, match="must have 1 to 256 bytes"):
        launch(OMPI, job=job)
    assert launch(OMPI, job="ü" * 128).job == "ü" * 128
