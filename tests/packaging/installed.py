"""Runs a job of two agents and two ranks with whatever allreduced the running Python has; its status tells the outcome.

Nothing but the installed package is used: this is what a wheel is tested with, wherever it was built.
"""

from __future__ import annotations

import subprocess
import sys


def rank() -> None:
    import numpy as np

    from allreduced.client import connect

    comm = connect(deadline=60.0)
    result = comm.all_reduce(np.full(100_000, comm.rank + 1.0, dtype=np.float32), deadline=60.0)
    assert result.tolist() == [3.0] * 100_000, result
    comm.close()


def main() -> int:
    if sys.argv[1:] == ["rank"]:
        rank()
        return 0
    run = [sys.executable, "-P", "-m", "allreduced.cli.main", "run", "--nodes", "2", "--ranks-per-node", "1"]
    return subprocess.run([*run, "--", sys.executable, "-P", __file__, "rank"], timeout=120, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
