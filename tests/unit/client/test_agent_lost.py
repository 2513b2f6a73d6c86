"""The agent goes away and comes back: what callers are told, and how the communicator goes on."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from allreduced.client import (
    AgentUnavailable,
    AsyncCommunicator,
    ClosedError,
    Communicator,
    DeadlineExceeded,
    PeerLost,
    connect,
    endpoint,
)
from allreduced.core.addresses import SocketAddress
from allreduced.core.errors import to_wire
from allreduced.protocol.local import Join, RequestFailed, Submit, ToAgent

if TYPE_CHECKING:
    import socket

    from tests.unit.client.conftest import Client, FakeAgent, MakeAgent

    from allreduced.client.async_communicator import Connecting

LARGE = 100_000
"""Elements that do not fit inside a message."""


def alone(agent: FakeAgent, **arguments: float) -> Communicator:
    """Connect as the only rank."""
    return connect(socket=agent.socket, job="lost", rank=0, size=1, **arguments)  # type: ignore[arg-type]  # mixed keywords


def aalone(agent: FakeAgent) -> Connecting:
    """Connect as the only rank, with asyncio."""
    return AsyncCommunicator.connect(socket=agent.socket, job="lost", rank=0, size=1)


@pytest.fixture
def at_attempt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """Return what has something done right before the n-th look for an agent from now on."""
    actions: dict[int, Callable[[], object]] = {}
    real = endpoint.open_socket
    attempts = 0

    def open_socket(address: SocketAddress, *, path: str, trusting: bool = False) -> socket.socket:
        nonlocal attempts
        attempts += 1
        if action := actions.pop(attempts, None):
            action()
        return real(address, path=path, trusting=trusting)

    def register(number: int, action: Callable[[], object]) -> None:
        nonlocal attempts
        attempts = 0
        actions[number] = action

    monkeypatch.setattr(endpoint, "open_socket", open_socket)
    return register


def test_works_in_flight_end_at_once_and_the_next_call_goes_to_the_next_agent(make_agent: MakeAgent) -> None:
    agent = make_agent()
    agent.hold = True
    with alone(agent) as comm:
        works = [comm.all_reduce(np.ones(LARGE), name=name, async_op=True) for name in "ab"]
        buffer = comm.zeros(LARGE)
        view = comm.all_reduce(np.arange(LARGE), view=True)
        agent.until(lambda: agent.count(Submit) == 3)
        agent.close()
        for work in works:
            with pytest.raises(AgentUnavailable, match="ended"):
                work.wait()
        following = make_agent(name=agent.socket)
        buffer += 7  # what was shared with the old agent is this process's own now, and a fine input
        assert comm.all_reduce(buffer).tolist() == [7.0] * LARGE
        assert view.tolist() == list(range(LARGE))
        assert comm.all_reduce(view).tolist() == view.tolist()
        assert comm.all_reduce(np.arange(3), out=buffer[:3].astype("int64")).tolist() == [0, 1, 2]
        fresh = comm.zeros(LARGE)
        staged = sum(submit.arena >= 0 for submit in following.seen if isinstance(submit, Submit))
        assert comm.all_reduce(fresh, view=True).tolist() == [0.0] * LARGE
        assert staged == 2
        assert [join.rank for join in following.seen if isinstance(join, Join)] == [0]
        with pytest.raises(AgentUnavailable):  # it ended so for good
            works[0].wait()


def test_a_loss_between_calls_is_told_by_the_next_one(make_agent: MakeAgent) -> None:
    agent = make_agent()
    with alone(agent) as comm:
        comm.barrier()
        agent.close()
        make_agent(name=agent.socket)
        with pytest.raises(AgentUnavailable):  # ranks must not slip past a break that others saw
            comm.all_reduce(np.ones(3))
        assert comm.all_reduce(np.ones(3)).tolist() == [1.0] * 3


def test_a_loss_that_only_exception_told_of_is_told(make_agent: MakeAgent) -> None:
    agent = make_agent()
    agent.hold = True
    with alone(agent) as comm:
        work = comm.all_reduce(np.ones(3), name="x", async_op=True)
        agent.close()
        with pytest.raises(AgentUnavailable):
            comm.empty(LARGE)
        assert isinstance(work.exception(), AgentUnavailable)
        make_agent(name=agent.socket)
        assert comm.empty(LARGE).size == LARGE


def test_a_call_waits_for_the_agent_until_its_deadline(
    make_agent: MakeAgent, at_attempt: Callable[[int, Callable[[], object]], None]
) -> None:
    agent = make_agent()
    with alone(agent) as comm:
        agent.close()
        with pytest.raises(AgentUnavailable):
            comm.barrier()
        for _ in range(2):
            with pytest.raises(AgentUnavailable, match=r"did not come back within 0(\.\d+)? s: no agent answers at @"):
                comm.all_reduce(np.ones(3), deadline=0.05)
        at_attempt(4, lambda: make_agent(name=agent.socket))
        assert comm.all_reduce(np.ones(3)).tolist() == [1.0] * 3


def test_connect_waits_for_an_agent_that_was_there_before(
    make_agent: MakeAgent, at_attempt: Callable[[int, Callable[[], object]], None]
) -> None:
    agent = make_agent()
    broken = alone(agent)
    agent.close()
    with pytest.raises(AgentUnavailable, match=r"did not come back within 0(\.\d+)? s"):
        alone(agent, deadline=0.05)
    at_attempt(3, lambda: make_agent(name=agent.socket))
    with alone(agent) as comm:
        assert comm.all_reduce(np.ones(3)).tolist() == [1.0] * 3
    broken.close()


def test_the_usual_place_is_waited_for_and_no_private_agent_started(
    make_agent: MakeAgent,
    at_attempt: Callable[[int, Callable[[], object]], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("ALLREDUCED_SOCKET", "ALLREDUCED_AGENT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "allreduced").mkdir()
    place = tmp_path / "allreduced" / "agent.sock"
    agent = make_agent(name=str(place))
    broken = connect(job="lost", rank=0, size=1)
    agent.close()
    place.unlink()
    at_attempt(4, lambda: make_agent(name=str(place)))
    with connect(job="lost", rank=0, size=1) as comm:
        assert comm.all_reduce(np.ones(3)).tolist() == [1.0] * 3
    broken.close()


def test_ranks_that_do_not_come_back_are_named_and_the_next_call_tries_again(make_agent: MakeAgent) -> None:
    agent = make_agent()
    refusals = 1

    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        nonlocal refusals
        if isinstance(message, Join) and refusals:
            refusals -= 1
            assert message.deadline <= 9.0
            client.send(RequestFailed(message.request, to_wire(DeadlineExceeded("rank 1 missing", missing=[1]))))
            return True
        return False

    with alone(agent) as comm:
        agent.close()
        with pytest.raises(AgentUnavailable):
            comm.barrier()
        make_agent(script, agent.socket)
        with pytest.raises(DeadlineExceeded) as caught:
            comm.barrier(deadline=9.0)
        assert caught.value.missing == (1,)
        assert comm.all_reduce(np.ones(3)).tolist() == [1.0] * 3


def test_the_time_that_was_waited_counts_against_the_deadline(make_agent: MakeAgent) -> None:
    agent = make_agent()
    with alone(agent) as comm:
        agent.close()
        with pytest.raises(AgentUnavailable):
            comm.barrier()
        following = make_agent(name=agent.socket)
        comm.barrier(deadline=50.0)
        [submit] = [message for message in following.seen if isinstance(message, Submit)]
        assert 0 < submit.deadline < 50.0


def test_a_group_that_had_ended_before_stays_ended(make_agent: MakeAgent) -> None:
    agent = make_agent()
    with alone(agent) as comm:
        agent.end_group(PeerLost("agent 'b' is gone", nodes=["b"], ranks=[1]))
        work = comm.all_reduce(np.ones(3), name="x", async_op=True)
        agent.close()
        make_agent(name=agent.socket)
        work.exception()
        for _ in range(2):
            with pytest.raises(PeerLost):
                comm.barrier()


def test_many_threads_take_the_rank_anew_once(make_agent: MakeAgent) -> None:
    agent = make_agent()
    with alone(agent) as comm:
        agent.close()
        with pytest.raises(AgentUnavailable):
            comm.barrier()
        sums: list[float] = []

        def run(value: float) -> None:
            sums.append(float(comm.all_reduce(np.full(LARGE, value), name=f"n{value}")[-1]))

        threads = [threading.Thread(target=run, args=(float(value),)) for value in range(4)]
        for thread in threads:
            thread.start()
        following = make_agent(name=agent.socket)
        for thread in threads:
            thread.join()
        assert sorted(sums) == [0.0, 1.0, 2.0, 3.0]
        assert following.count(Join) == 1


def test_close_ends_a_wait_for_the_agent(
    make_agent: MakeAgent, at_attempt: Callable[[int, Callable[[], object]], None]
) -> None:
    agent = make_agent()
    comm = alone(agent)
    agent.close()
    with pytest.raises(AgentUnavailable):
        comm.barrier()
    waiting = threading.Event()
    at_attempt(2, waiting.set)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            comm.barrier()
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    waiting.wait()
    comm.close()
    thread.join()
    assert len(errors) == 1


def held(agent: FakeAgent) -> tuple[int, int]:
    """Return how many descriptors and maps of shared memory this process has, without the results of the agent."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("/memfd:")
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # closes its own at once
    arenas = len(agent.result_arenas)  # each has a descriptor, and its mapping another one
    return descriptors - 2 * arenas, maps - arenas


def barriers(comm: Communicator) -> None:
    """Call until an error comes: the agent does at its next turn what it is asked to."""
    while True:
        comm.barrier()


def test_a_hundred_losses_leave_nothing_behind(make_agent: MakeAgent) -> None:
    agent = make_agent()  # drops its clients, and goes on as a following one would
    with alone(agent) as comm:
        before = None
        for turn in range(100):
            buffer = comm.zeros(LARGE)
            view = comm.all_reduce(buffer, view=True)
            agent.kill()
            with pytest.raises(AgentUnavailable):
                barriers(comm)
            assert comm.all_reduce(np.full(LARGE, turn))[-1] == turn
            assert view[-1] == buffer[-1] == 0
            del view, buffer
            agent.until(lambda: len(agent.clients) == 1)
            before = before or held(agent)
        assert held(agent) == before
        assert agent.count(Join) == 101


async def test_asyncio_ends_works_at_once_and_goes_on_with_the_next_agent(make_agent: MakeAgent) -> None:
    agent = make_agent()
    async with aalone(agent) as comm:
        buffer = await comm.zeros(LARGE)
        await comm.all_reduce(buffer)
        agent.hold = True
        works = [comm.all_reduce(np.ones(LARGE), name=name) for name in "ab"]
        agent.close()
        for work in works:
            with pytest.raises(AgentUnavailable):
                await work
        # Calls start in their order once the agent is there.
        waiting = [comm.all_reduce(np.full(3, value)) for value in range(4)]
        following = make_agent(name=agent.socket)
        assert [(await work).tolist() for work in waiting] == [[value] * 3 for value in range(4)]
        assert (await comm.all_reduce(buffer)).tolist() == [0.0] * LARGE
        assert (await comm.zeros(LARGE)).size == LARGE
        payloads = [submit.payload for submit in following.seen if isinstance(submit, Submit)][:4]
        assert payloads == [np.full(3, value).tobytes() for value in range(4)]
        assert following.count(Join) == 1


async def test_asyncio_tells_a_loss_between_calls_by_the_next_one(make_agent: MakeAgent) -> None:
    agent = make_agent()
    async with aalone(agent) as comm:
        await comm.barrier()
        agent.close()
        make_agent(name=agent.socket)
        with pytest.raises(AgentUnavailable):
            await comm.all_reduce(np.ones(3))
        assert (await comm.empty(LARGE)).size == LARGE
        assert (await comm.all_reduce(np.ones(3))).tolist() == [1.0] * 3


async def test_asyncio_ends_every_call_by_its_own_deadline(make_agent: MakeAgent) -> None:
    agent = make_agent()
    async with aalone(agent) as comm:
        agent.close()
        with pytest.raises(AgentUnavailable):
            await comm.barrier()
        patient = comm.all_reduce(np.ones(3), deadline=50.0)
        hasty = comm.all_reduce(np.ones(3), deadline=0.05)
        for work in (hasty, patient):  # the later ones must not pass those before
            with pytest.raises(AgentUnavailable, match="did not come back"):
                await work
        make_agent(name=agent.socket)
        assert (await comm.all_reduce(np.ones(3))).tolist() == [1.0] * 3


async def test_asyncio_closes_while_it_waits_for_the_agent(make_agent: MakeAgent) -> None:
    agent = make_agent()
    comm = await aalone(agent)
    agent.close()
    with pytest.raises(AgentUnavailable):
        await comm.barrier()
    work = comm.barrier()
    await comm.close()
    with pytest.raises(ClosedError):
        await work
    with pytest.raises(ClosedError):
        comm.barrier()
