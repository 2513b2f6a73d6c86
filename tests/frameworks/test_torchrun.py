"""torchrun starts a script that calls ``connect()``; no agent is installed or running."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.integration.agents import reserved_port

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed; `make test-frameworks` installs it"
)

SCRIPT = """
import os, numpy as np, torch
from allreduced.client import connect

comm = connect()
total = comm.all_reduce(np.full(1000, comm.rank + 1, "float32"))
assert total.tolist() == [10.0] * 1000, total
mean = comm.all_reduce(torch.arange(70_001, dtype=torch.float64) * (comm.rank + 1), op="mean")
assert torch.equal(mean, torch.arange(70_001, dtype=torch.float64) * 2.5), mean
for kind in (torch.bfloat16, torch.float16, torch.complex64, torch.uint16, torch.int8):
    for count in (3, 70_001):
        x = torch.full((count,), 3, dtype=kind)
        y = comm.all_reduce(x)
        assert y.dtype is kind and (y == torch.full((count,), 12, dtype=kind)).all(), y
        assert comm.all_reduce(x, out=x) is x and x[0].item() == 12, x
some = comm.all_reduce(torch.tensor([comm.rank == 2, False]))
assert some.tolist() == [True, False], some
os.write(1, f"rank {comm.rank} of {comm.size} ok\\n".encode())
comm.close()
"""


def _of_job(mark: Path) -> list[psutil.Process]:
    """Return what the job of this mark left running: its variables are inherited by the private agent too."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("TEST_MARK") == str(mark):
                found.append(process)
    return found


def _torchrun(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Without an address torchrun looks up the name of this machine, which takes minutes where no name service answers.
    with reserved_port() as port:  # else it is always the same one, which another run may have
        options = ["--local-addr", "127.0.0.1", "--master-port", str(port), *arguments]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ALLREDUCED_")}
    environment["TEST_MARK"] = str(script)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("arguments", [("--nproc-per-node", "4"), ("--standalone", "--nproc-per-node", "4")])
def test_a_short_script_reduces_over_four_ranks_and_leaves_no_agent(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = _torchrun(script, *arguments)
    assert ended.returncode == 0, ended.stderr
    assert sorted(line for line in ended.stdout.splitlines() if line.startswith("rank ")) == [
        f"rank {rank} of 4 ok" for rank in range(4)
    ]
    _, alive = psutil.wait_procs(_of_job(script), timeout=30)
    assert not alive


def test_a_rank_that_dies_ends_the_others_with_its_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, numpy as np\n"
        "from allreduced.client import connect\n"
        "comm = connect()\n"
        "comm.barrier()\n"
        "if comm.rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n"
        "    comm.all_reduce(np.ones(4, 'float32'))\n"
        "except Exception as error:\n"
        "    os.write(1, f'{type(error).__name__} {error.ranks}\\n'.encode())\n"
        "    raise\n"
    )
    ended = _torchrun(script, "--nproc-per-node", "4")
    assert ended.returncode != 0
    # torchrun ends the others as soon as it sees the death, so how many of them get to print is its choice
    assert set(ended.stdout.split("\n")) <= {"RankLost (2,)", ""}
    _, alive = psutil.wait_procs(_of_job(script), timeout=30)
    assert not alive
