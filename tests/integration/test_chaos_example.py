"""examples/chaos.py does what it says to a job, and tells what the job did."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "chaos.py"
RUN = (
    sys.executable,
    "-m",
    "allreduced.cli.main",
    "run",
    "--nodes",
    "2",
    "--ranks-per-node",
    "2",
    "--",
    sys.executable,
)
SECONDS = 100.0

JOB = """
import pathlib, sys
import numpy as np
from allreduced.client import connect

with connect() as comm:
    more = True
    while more:
        assert comm.all_reduce(np.full(100_000, comm.rank))[0] == 6.0
        more = bool(comm.broadcast(np.array([not pathlib.Path(sys.argv[1]).exists()]))[0])
"""


@contextmanager
def chaos(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ALLREDUCED_")}
    command = [sys.executable, str(EXAMPLE), "--limit", str(SECONDS), *arguments]
    with subprocess.Popen(command, env=clean, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_a_job_that_is_stopped_for_moments_goes_on(tmp_path: Path) -> None:
    end = tmp_path / "end"
    said = []
    options = ("--kinds", "pause-agent,pause-rank", "--every", "0.2", "--pause", "0.1", "--faults", "3", "--seed", "1")
    with chaos(*options, "--", *RUN, "-c", JOB, str(end)) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if "no more faults" in line:
                end.touch()
        assert process.wait(SECONDS) == 0, said
    faults = [
        line for line in said if re.fullmatch(r"chaos: +\d+\.\d+ s: stopped (agent node|rank )\d .* for 0.1 s\n", line)
    ]
    assert len(faults) == 3, said
    assert said[-2].startswith("chaos: the job ended with status 0 "), said
    assert said[-1].startswith("chaos: faults of 1 runs: "), said


def test_a_job_whose_agent_is_killed_ends_and_the_status_says_so(tmp_path: Path) -> None:
    options = ("--kinds", "kill-agent", "--every", "0.2", "--seed", "1")
    with chaos(*options, "--", *RUN, "-c", JOB, str(tmp_path / "never")) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(SECONDS) == 137, said
    assert "chaos: faults of 1 runs: 1 × kill-agent\n" in said
    assert re.search(r"chaos: the job ended with status 137 \d+\.\d\d s after its last fault\n", said)


def test_connections_of_a_running_job_are_cut(tmp_path: Path) -> None:
    end = tmp_path / "end"
    command = [*RUN, "-c", JOB, str(end)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as job:
        try:
            options = ("--kinds", "cut", "--every", "0.2", "--faults", "1", "--pid", str(job.pid))
            with chaos(*options) as process:
                assert process.stderr is not None
                said = []
                for line in process.stderr:
                    said.append(line)
                    if "no more faults" in line:
                        end.touch()
                assert process.wait(SECONDS) == 0, said
            job.wait(SECONDS)
        finally:
            job.terminate()
    assert re.search(r"s: cut [1-9]\d* connections of agent node\d", "".join(said)), said


def test_what_is_not_there_is_a_clear_error() -> None:
    for arguments, wanted in (
        (("--kinds", "flood", "--pid", "1"), "there is no fault 'flood', only kill-agent"),
        ((), "give a command after --, or the --pid"),
        (("--every", "0", "--", "true"), "must be greater than 0"),
    ):
        ended = subprocess.run(
            [sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert ended.returncode == 2
        assert wanted in ended.stderr
