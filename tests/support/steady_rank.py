"""One rank of a job. Writes a line when operations work, and when its agent is lost; then it goes on.

usage: steady_rank.py RANK SIZE LOCAL_RANK LOCAL_SIZE OPERATIONS

It needs nothing but an installed client, of this version or of the one before.
"""

from __future__ import annotations

import sys

import numpy as np

from allreduced.client import Communicator, connect
from allreduced.core.errors import AgentUnavailable, ClusterError, GroupChanged

SECONDS = 60.0


def main() -> None:
    rank, size, local_rank, local_size, operations = map(int, sys.argv[1:])

    def joined() -> Communicator:
        return connect(
            job="job",
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            deadline=SECONDS,
            agent="require",
        )

    said = ""

    def say(line: str) -> None:
        nonlocal said
        if line != said:
            said = line
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    comm = joined()
    done = 0
    while done < operations:
        try:
            result = comm.all_reduce(np.full(1000, rank + 1.0), deadline=SECONDS)
        except (AgentUnavailable, ClusterError, GroupChanged) as error:
            say(f"lost {type(error).__name__}")
            comm.close()
            comm = joined()
        else:
            done += 1
            say(f"{result[0]:g} {result[-1]:g}")
    comm.close()


if __name__ == "__main__":
    main()
