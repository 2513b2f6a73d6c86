"""One rank of a job in the machine. Writes a line when operations work, and when its agent is lost; then it goes on.

usage: rank.py RANK SIZE OPERATIONS
"""

from __future__ import annotations

import sys

import numpy as np

from allreduced.client import connect
from allreduced.core.errors import AgentUnavailable, ClusterError, GroupChanged

SECONDS = 60.0


def main() -> None:
    rank, size, operations = map(int, sys.argv[1:])
    comm = connect(job="job", rank=rank, size=size, local_rank=rank, local_size=size, deadline=SECONDS)
    done = 0
    said = ""
    while done < operations:
        try:
            result = comm.all_reduce(np.full(1000, rank + 1.0), deadline=SECONDS)
        except (AgentUnavailable, ClusterError, GroupChanged) as error:
            line = f"lost {type(error).__name__}"
        else:
            done += 1
            line = f"{result[0]:g} {result[-1]:g}"
        if line != said:
            said = line
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    comm.close()


if __name__ == "__main__":
    main()
