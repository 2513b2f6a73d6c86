"""`allreduced bench` as users run it, with small sizes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.integration.agents import complaints

COMMAND = (sys.executable, "-m", "allreduced.cli.main")
SMALL = ("-b", "8", "-e", "512K", "-f", "256", "--iters", "2", "--warmup", "1")


def run(*arguments: str) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, complaints(done.stderr)) == (0, [])
    return done.stdout


def test_a_table_in_the_form_of_nccl_tests() -> None:
    lines = run("bench", "--ranks-per-node", "2", *SMALL).splitlines()
    assert "nodes 1, ranks 2, ranks_per_node 2, cores " in lines[0]
    assert lines[2].split() == ["#", "size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong"]
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [row[:4] for row in rows] == [
        ["8", "2", "float32", "sum"],
        ["2048", "512", "float32", "sum"],
        ["524288", "131072", "float32", "sum"],
    ]
    assert [row[-1] for row in rows] == ["0", "0", "0"]
    assert "# wrong elements: 0" in lines


@pytest.mark.parametrize(
    "options",
    [
        ("--op", "mean", "--dtype", "float64", "--view"),
        ("--op", "prod", "--dtype", "int32"),
        ("--collective", "broadcast", "--copy"),
    ],
)
def test_results_over_two_agents_are_exact(options: tuple[str, ...]) -> None:
    found = json.loads(run("bench", "--nodes", "2", "--ranks-per-node", "2", "--json", *SMALL, *options))
    assert (found["nodes"], found["ranks"]) == (2, 4)
    assert [row["wrong"] for row in found["rows"]] == [0, 0, 0]
    assert all(row["seconds"] > 0 and row["algbw"] == row["nbytes"] / row["seconds"] for row in found["rows"])


def test_in_a_launched_job_it_measures_that_job() -> None:
    shown = run("run", "--ranks-per-node", "3", "--no-prefix", "--", *COMMAND, "bench", "--json", "--no-check", *SMALL)
    found = json.loads(shown)
    assert (found["nodes"], found["ranks"]) == (1, 3)
    assert [row["wrong"] for row in found["rows"]] == [None, None, None]
