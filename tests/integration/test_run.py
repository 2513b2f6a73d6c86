"""`allreduced run` with real agents and clients."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from tests.integration.agents import complaints

from allreduced.cli.processes import descendants

RANK = """
import os
import numpy as np
from allreduced.client import connect

with connect() as comm:
    total = comm.all_reduce(np.arange(3000, dtype="int64") * (comm.rank + 1), op="sum")
    assert total.tolist() == [10 * number for number in range(3000)], total
    line = f"{comm.rank}/{comm.size} {comm.local_rank}/{comm.local_size} {comm.nodes[comm.node]} {','.join(comm.nodes)}"
    os.write(1, f"{line}\\n".encode())  # in one piece: all ranks write into one pipe
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "allreduced.cli.main", "run", *arguments]


def test_ranks_of_several_agents_reduce_together() -> None:
    done = subprocess.run(
        command("--nodes", "2", "--ranks-per-node", "2", "--no-prefix", "--", sys.executable, "-c", RANK),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, complaints(done.stderr)) == (0, [])
    assert sorted(done.stdout.splitlines()) == [
        f"{rank}/4 {rank % 2}/2 node{rank // 2} node0,node1" for rank in range(4)
    ]


def test_a_wrong_setting_of_the_agents_is_one_clear_error(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[engine]\nthreats = 2\n")
    done = subprocess.run(
        command(f"--agent-arg=--config={config}", "--", "echo", "never"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "unknown key 'threats'" in done.stderr
    assert "Traceback" not in done.stderr


def test_agents_and_ranks_end_when_the_command_is_killed() -> None:
    rank = (
        "import signal\nfrom allreduced.client import connect\ncomm = connect()\n"
        "print('up', flush=True)\nsignal.pause()"
    )
    with subprocess.Popen(command("--nodes", "2", "--", sys.executable, "-c", rank), stdout=subprocess.PIPE) as front:
        assert front.stdout is not None
        assert {front.stdout.readline() for _ in range(2)} == {b"[0] up\n", b"[1] up\n"}
        family = [os.pidfd_open(process.pid) for process in descendants(front.pid)]
        assert len(family) == 5  # supervisor, two agents, two ranks
        try:
            front.send_signal(signal.SIGKILL)
            front.wait()
            poll = select.poll()
            for fd in family:
                poll.register(fd, select.POLLIN)
            ended: set[int] = set()
            while len(ended) < len(family):
                found = {fd for fd, _ in poll.poll(30_000)}
                assert found, "still running after 30 s"
                for fd in found:
                    poll.unregister(fd)
                ended |= found
        finally:
            for fd in family:
                os.close(fd)
