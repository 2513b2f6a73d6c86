"""A rank in a container: reduces for ever, and goes on after each loss. Ends in order once rank 0 got SIGTERM.

Writes a line of JSON for each result that differs from the last line, and for each error.
"""

import json
import signal
import sys

import numpy as np

from allreduced.client import connect
from allreduced.core.errors import AgentUnavailable, GroupChanged, PeerLost, RankLost, to_wire

stopping = False


def stop(number: int, frame: object) -> None:
    global stopping
    stopping = True


def tell(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


signal.signal(signal.SIGTERM, stop)
comm, going, told = connect(deadline=120.0), True, False
while going:
    try:
        going = bool(comm.broadcast(np.array([not stopping]), root=0)[0])
        # 1 MB: through shared memory, and in several pieces between the nodes.
        x = np.full(250_000, comm.rank + 1, "float32")
        total = comm.all_reduce(x, op="sum")
        if not told:
            tell(value=float(total[0]), same=bool((total == total[0]).all()), size=comm.size)
            told = True
    except (AgentUnavailable, GroupChanged, PeerLost, RankLost) as error:
        code, message, _, facts = to_wire(error)
        tell(error=code, message=message, **facts)
        comm.close()
        comm, told = connect(deadline=120.0), False
comm.close()
