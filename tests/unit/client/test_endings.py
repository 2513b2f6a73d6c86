"""How a communicator ends: closed, dropped, forked, interrupted, with its process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from allreduced.client import (
    ClosedError,
    Communicator,
    connect,
)
from allreduced.protocol.local import (
    Leave,
)

if TYPE_CHECKING:
    from tests.unit.client.conftest import FakeAgent

LARGE = 100_000
"""Elements that do not fit inside a message."""


def test_views_stay_valid_after_close_and_hold_the_connection(agent: FakeAgent, comm: Communicator) -> None:
    view = comm.all_reduce(np.full(LARGE, 2.0), view=True)
    comm.close()
    agent.until(lambda: agent.count(Leave) == 1)
    assert len(agent.leases) == 1
    assert len(agent.clients) == 1
    assert view[-1] == 2.0
    del view
    agent.until(lambda: not agent.clients)


def test_close_is_orderly_and_ends_what_is_pending(agent: FakeAgent, comm: Communicator) -> None:
    agent.hold = True
    work = comm.all_reduce(np.ones(1), name="x", async_op=True)
    comm.close()
    comm.close()
    agent.until(lambda: agent.count(Leave) == 1 and not agent.clients)
    with pytest.raises(ClosedError):
        work.wait()
    with pytest.raises(ClosedError):
        comm.all_reduce(np.ones(1))
    with pytest.raises(ClosedError):
        comm.empty(LARGE)


def test_a_dropped_communicator_leaves(agent: FakeAgent) -> None:
    comm = connect(socket=agent.socket, job="j", rank=0, size=1)
    comm.barrier()
    del comm
    gc.collect()
    agent.until(lambda: agent.count(Leave) == 1 and not agent.clients)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_cannot_use_the_communicator_and_does_not_disturb_the_parent(
    agent: FakeAgent, comm: Communicator
) -> None:
    comm.all_reduce(np.ones(LARGE))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            comm.barrier()
        except ClosedError as error:
            status = 0 if "connect() again" in str(error) else 2
            with connect(socket=agent.socket, job="child", rank=0, size=1) as own:
                status = 0 if own.all_reduce(np.ones(LARGE))[0] == 1 and status == 0 else 3
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert comm.all_reduce(np.ones(LARGE))[0] == 1


def test_an_interrupted_wait_can_be_repeated(agent: FakeAgent, comm: Communicator) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    agent.hold = True
    work = comm.all_reduce(np.ones(LARGE), name="x", async_op=True)

    def interrupted() -> None:
        agent.order(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        work.wait()

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        signal.signal(signal.SIGUSR1, before)
    agent.complete("x")
    assert work.wait()[0] == 1


def test_close_in_another_thread_ends_a_wait(
    agent: FakeAgent, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allreduced.client.session.SLICE_SECONDS", 0.01)
    agent.hold = True
    view = comm.all_reduce(np.ones(LARGE), view=True)  # keeps the connection open after close()
    work = comm.all_reduce(np.ones(1), name="x", async_op=True)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait()
        except ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    comm.close()
    thread.join(20)
    assert len(ended) == 1
    assert view[0] == 1


SCRIPT = """
import numpy as np
from allreduced.client import connect
comm = connect(socket={socket!r}, job="script", rank=0, size=1)
comm.all_reduce(np.ones(100_000))
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "view = comm.all_reduce(np.ones(100_000), view=True)"])
def test_a_script_that_just_ends_leaves_orderly(agent: FakeAgent, end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.format(socket=agent.socket, end=end)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    agent.until(lambda: agent.count(Leave) == 1 and not agent.clients)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_of_multiprocessing_leaves_orderly(agent: FakeAgent) -> None:
    def child(socket: str) -> None:
        connect(socket=socket, job="child", rank=0, size=1).barrier()

    process = multiprocessing.get_context("fork").Process(target=child, args=(agent.socket,))
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()
    agent.until(lambda: agent.count(Leave) == 1 and not agent.clients)


def test_no_descriptors_are_left(agent: FakeAgent) -> None:
    def count() -> int:
        gc.collect()
        agent.until(lambda: not agent.clients)
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def use() -> None:
        with connect(socket=agent.socket, job="j", rank=0, size=1) as comm:
            view = comm.all_reduce(comm.zeros(LARGE), view=True)
            comm.all_reduce(np.ones(3 * LARGE))
            assert view[0] == 0
            del view

    use()
    agent.until(lambda: agent.ended == 1)
    before = count()
    for i in range(3):
        use()
        agent.until(lambda: agent.ended == i + 2)  # noqa: B023  # called before the next round
    # The agent keeps its own result arenas: one for each new result that found no room.
    assert count() - before <= 2 * (len(agent.result_arenas))
