"""A rank of a chaos job: ``python -m tests.chaos.rank``. Forms the groups that it is told to, and says what came of it.

Reads a line of JSON for each group: ``{"job", "rank", "size", "socket", "sizes", "mixed", "deadline"}``. Rank 0 ends a
group after a line ``stop``. Writes lines of JSON; times are of the monotonic clock, which all processes share:

- ``{"event": "ready"}`` when it has started, ``{"event": "formed", "job", "t"}`` when it is in a group,
- ``{"event": "step", "job", "step", "t", "got": […]}`` after each step: names of the calls whose result was
  right; where something was not, also ``"wrong": {name: what}`` and
  ``"errors": {name: {"code", "message", "t", facts}}``,
- ``{"event": "over", "job", "t", "error": None or {…}}`` when it has left a group: ``error`` is what a last call
  got, which it makes in any case but one: where its own agent was lost it would wait for the next one.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Mapping

import numpy as np
from tests.chaos.calls import large_calls, step_calls

from allreduced.client import connect
from allreduced.client.communicator import Communicator
from allreduced.core.errors import AgentUnavailable, AllReducedError, to_wire

FORM_SECONDS = 60.0
"""For the others to come, which may have to start first; calls have a deadline of their own."""


class Orders:
    """Lines on standard input."""

    def __init__(self) -> None:
        self._data = b""

    def next(self) -> str:
        """Wait for a line and return it; empty at the end."""
        while b"\n" not in self._data:
            more = os.read(0, 65536)
            if not more:
                return ""
            self._data += more
        line, _, self._data = self._data.partition(b"\n")
        return line.decode()

    def stop(self) -> bool:
        """Return whether the group is to end: there is a line, or nobody is there any more."""
        return b"\n" in self._data or bool(select.select([0], [], [], 0.0)[0])


def tell(event: str, **facts: object) -> None:
    """Write one line, in one piece."""
    os.write(1, json.dumps({"t": time.monotonic(), "event": event, **facts}).encode() + b"\n")


def described(error: AllReducedError) -> dict[str, object]:
    """Return an error as plain values, with the time."""
    code, message, _, facts = to_wire(error)
    return {**facts, "code": code, "message": message, "t": time.monotonic()}


def step(
    comm: Communicator, job: str, number: int, sizes: list[int], *, mixed: bool, stop: bool
) -> tuple[bool, set[object]]:
    """Make one step; return whether rank 0 wants another one, and the codes of all errors."""
    calls = (step_calls if mixed else large_calls)(number, comm.rank, comm.size, sizes)
    got, wrong, errors, works = [], {}, {}, {}
    more = False
    try:
        flag = comm.broadcast(np.array([comm.rank == 0 and not stop]), 0, name="go on", async_op=True)
    except AllReducedError as error:
        errors["go on"] = described(error)
    else:
        for call in calls:
            try:
                works[call.name] = call, call.start(comm)
            except AllReducedError as error:
                errors[call.name] = described(error)
                if isinstance(error, AgentUnavailable):
                    break  # a further call would wait for the next agent
        try:
            more = bool(flag.wait()[0])
            got.append("go on")
        except AllReducedError as error:
            errors["go on"] = described(error)
    for name, (call, work) in works.items():
        try:
            fault = call.fault(work.wait())
        except AllReducedError as error:
            errors[name] = described(error)
        else:
            if fault:
                wrong[name] = fault
            else:
                got.append(name)
    bad = {key: value for key, value in (("wrong", wrong), ("errors", errors)) if value}
    tell("step", job=job, step=number, got=got, **bad)
    return more, {error["code"] for error in errors.values()}


def run(order: Mapping[str, object], orders: Orders) -> None:
    """Be a rank of one group, from its beginning to its end."""
    job, mixed, error = str(order["job"]), bool(order["mixed"]), None
    sizes = [int(str(nbytes)) for nbytes in order["sizes"]] if isinstance(order["sizes"], list) else []
    try:
        with connect(
            job=job,
            rank=int(str(order["rank"])),
            size=int(str(order["size"])),
            local_rank=0,
            local_size=1,
            socket=str(order["socket"]),
            deadline=FORM_SECONDS,
            default_deadline=float(str(order["deadline"])),
        ) as comm:
            tell("formed", job=job)
            number, more, codes = 0, True, set[object]()
            while more and not codes:
                more, codes = step(comm, job, number, sizes, mixed=mixed, stop=comm.rank == 0 and orders.stop())
                number += 1
            if AgentUnavailable.code not in codes:
                comm.barrier(name="end")  # how does a further call end?
    except AllReducedError as failed:
        error = described(failed)
    tell("over", job=job, error=error)


def main() -> None:
    """Serve orders until there are no more."""
    orders = Orders()
    tell("ready")
    while line := orders.next():
        if line != "stop":
            run(json.loads(line), orders)


if __name__ == "__main__":
    main()
