"""The scripts in configs/slurm, run by a stand-in for Slurm's commands: hosts are addresses of the loopback interface.

``srun`` below starts what a step has to start, with the variables that Slurm sets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.agents import StartAgent

FOLDER = Path(__file__).parents[2] / "configs" / "slurm"
SCRIPTS = ("private.sbatch", "allocation.sbatch", "service.sbatch")
HOSTS = ("127.0.0.1", "127.0.0.2")

TRAIN = """
import os, sys
import numpy as np
from allreduced.client import connect
def say(line):  # in one piece: print writes two where PYTHONUNBUFFERED is set, and all ranks write into one pipe
    os.write(1, (line + "\\n").encode())
with connect() as comm:
    total = comm.all_reduce(np.arange(3.0) + comm.rank, op="sum")
    say(f"rank {comm.rank} of {comm.size} on {len(comm.nodes)}: {total.tolist()} {sys.argv[1]}")
    if sys.argv[1] == "secrets":
        say(f"{len(os.environ.get('ALLREDUCED_JOB_SECRET', ''))} {os.environ.get('ALLREDUCED_AGENT')}")
"""

SRUN = """#!{python}
import os, signal, subprocess, sys
arguments, options = sys.argv[1:], []
while arguments and arguments[0].startswith("--"):
    options.append(arguments.pop(0))
per_node = next((int(o.split("=")[1]) for o in options if o.startswith("--ntasks-per-node=")), 2)
hosts = os.environ["HOSTS"].split(",")
size = per_node * len(hosts)
number = 0
while True:  # steps may start at the same time
    try:
        step = open(os.path.join(os.environ["STEPS"], str(number)), "x")
        break
    except FileExistsError:
        number += 1
step.write(" ".join(options))
step.close()
tasks = []
for node, host in enumerate(hosts):
    for local in range(per_node):
        tasks.append(subprocess.Popen(arguments, env={{**os.environ,
            "SLURM_STEP_ID": str(number), "SLURM_PROCID": str(node * per_node + local), "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(node), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_NUM_NODES": str(len(hosts)),
            "SLURM_STEP_TASKS_PER_NODE": f"{{per_node}}(x{{len(hosts)}})", "SLURM_STEP_NODELIST": hosts[0],
            "SLURMD_NODENAME": host}}))
def forward(signum, frame):
    for task in tasks:
        task.send_signal(signum)
signal.signal(signal.SIGTERM, forward)
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def slurm(tmp_path: Path, free_port: int) -> dict[str, str]:
    """Return the environment of a batch script on two nodes."""
    commands, steps = tmp_path / "bin", tmp_path / "steps"
    commands.mkdir()
    steps.mkdir()
    (commands / "srun").write_text(SRUN.format(python=sys.executable))
    (commands / "scontrol").write_text('#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && echo "$HOSTS" | tr , "\\n"\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ALLREDUCED_", "SLURM", "XDG_RUNTIME", "MASTER_"))
    }
    return clean | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "HOSTS": ",".join(HOSTS),
        "STEPS": str(steps),
        "SLURM_JOB_ID": str(100_000 + free_port),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": str(len(HOSTS)),
        "AGENT_PORT": str(free_port),
    }


def submit(
    script: str, environment: dict[str, str], tmp_path: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    train, batch = tmp_path / "train.py", tmp_path / script
    train.write_text(TRAIN)
    # The nodes are on one machine here: each listens at its own address.
    batch.write_text((FOLDER / script).read_text().replace("tcp://0.0.0.0:", "tcp://$SLURMD_NODENAME:"))
    return subprocess.run(
        ["bash", str(batch), *((str(train), *arguments) if arguments else ())],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100.0,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_free_of_slips(script: str) -> None:
    checker = ["shellcheck"] if shutil.which("shellcheck") else ["bash", "-n"]
    done = subprocess.run([*checker, str(FOLDER / script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_without_a_program_says_how_it_is_used(script: str, slurm: dict[str, str], tmp_path: Path) -> None:
    done = submit(script, slurm, tmp_path)
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr


@pytest.mark.parametrize(
    ("script", "steps"),
    [("private.sbatch", 1), ("allocation.sbatch", 3)],
)
def test_ranks_of_all_nodes_reduce_with_agents_of_their_own(
    script: str, steps: int, slurm: dict[str, str], tmp_path: Path
) -> None:
    done = submit(script, slurm, tmp_path, "here")
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert ranks == [f"rank {rank} of 4 on 2: [6.0, 10.0, 14.0] here" for rank in range(4)]
    assert len(list((tmp_path / "steps").iterdir())) == steps


def test_ranks_of_a_job_of_the_service_have_a_secret_and_use_its_agent(
    slurm: dict[str, str], tmp_path: Path, start_agent: StartAgent
) -> None:
    agent = start_agent("a")
    environment = slurm | {"HOSTS": HOSTS[0], "ALLREDUCED_SOCKET": agent.socket}
    done = submit("service.sbatch", environment, tmp_path, "secrets")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" of 2 on 1: [1.0, 3.0, 5.0] secrets") == 2
    assert done.stdout.count("64 require") == 2


def test_without_the_service_a_job_ends_and_says_so(slurm: dict[str, str], tmp_path: Path) -> None:
    done = submit("service.sbatch", slurm | {"ALLREDUCED_SOCKET": "@allreduced-nobody"}, tmp_path, "secrets")
    assert done.returncode != 0
    assert "AgentUnavailable" in done.stderr
    assert "@allreduced-nobody" in done.stderr
