"""Both ranks of one user's job in one process: JOB UID CALLS COUNT SOCKET0 SOCKET1.

When the group is formed it writes a line; at a line of input it makes the calls at once, and in the end it writes when
each ended (``time.monotonic``), as JSON.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import sys
import time

import numpy as np

from allreduced.client import AsyncCommunicator

BOUND = 60.0


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main(job: str, uid: int, calls: int, count: int, sockets: list[str]) -> None:
    codecs.lookup("ascii")  # loaded now: not every user may read where Python is
    os.seteuid(uid)  # as which sockets connect
    ranks = await asyncio.gather(
        *(
            AsyncCommunicator.connect(
                job=job, rank=rank, size=2, local_rank=0, local_size=1, socket=socket, deadline=BOUND
            )
            for rank, socket in enumerate(sockets)
        )
    )
    os.seteuid(os.getuid())
    say("formed")
    await asyncio.to_thread(sys.stdin.readline)

    async def call(number: int) -> float:
        inputs = [np.full(count, rank.rank + 1, "float32") for rank in ranks]
        results = await asyncio.gather(
            *(rank.all_reduce(x, name=str(number)) for rank, x in zip(ranks, inputs, strict=True))
        )
        ended = time.monotonic()
        assert all(np.all(result == 3.0) for result in results)
        return ended

    say(json.dumps(await asyncio.gather(*map(call, range(calls)))))
    for rank in ranks:
        await rank.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]))
