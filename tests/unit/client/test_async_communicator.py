from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from allreduced.client import (
    AsyncCommunicator,
    ClosedError,
    DeadlineExceeded,
    InvalidArgument,
    ProtocolError,
    RankClaimed,
    WaitTimeout,
)
from allreduced.protocol.local import AllocateArena, Join, Leave, Submit, ToAgent

if TYPE_CHECKING:
    from tests.unit.client.conftest import Client, FakeAgent, MakeAgent

    from allreduced.client.async_communicator import Connecting

    Connect = Callable[[], Connecting]

LARGE = 100_000


async def test_connect_is_a_context_manager_and_can_be_awaited(agent: FakeAgent, aconnect: Connect) -> None:
    async with aconnect() as comm:
        assert (await comm.all_reduce(np.arange(3))).tolist() == [0, 1, 2]
    comm = await aconnect()
    await comm.barrier()
    await comm.close()
    await comm.close()
    agent.until(lambda: agent.count(Leave) == 2 and not agent.clients)
    with pytest.raises(ClosedError):
        comm.barrier()


async def test_large_tensors_and_memory_of_the_agent(agent: FakeAgent, aconnect: Connect) -> None:
    async with aconnect() as comm:
        buf = await comm.zeros(LARGE, np.float64)
        buf += 1
        np.testing.assert_array_equal(await comm.all_reduce(buf), np.ones(LARGE))
        out = np.zeros(LARGE)
        assert await comm.all_reduce(np.full(LARGE, 3.0), out=out) is out
        assert out[-1] == 3
        results = await comm.all_reduce_many([buf, np.arange(5)])
        assert [result.size for result in results] == [LARGE, 5]
        assert (await comm.broadcast(buf))[0] == 1
    assert agent.count(AllocateArena) == 1


async def test_calls_start_at_once_and_in_order(agent: FakeAgent, aconnect: Connect) -> None:
    async with aconnect() as comm:
        works = [comm.all_reduce(np.full(size, 1.0)) for size in (LARGE, 1, 8 * LARGE, 2)]
        assert [len(result) for result in await asyncio.gather(*works)] == [LARGE, 1, 8 * LARGE, 2]
    assert [message.count for message in agent.seen if isinstance(message, Submit)] == [LARGE, 1, 8 * LARGE, 2]


async def test_a_timeout_or_a_cancelled_task_ends_only_its_wait(agent: FakeAgent, aconnect: Connect) -> None:
    agent.hold = True
    async with aconnect() as comm:
        work = comm.all_reduce(np.ones(3), name="late")
        with pytest.raises(WaitTimeout):
            await work.wait(timeout=0.01)
        task = asyncio.ensure_future(work.wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not work.done()
        agent.complete("late")
        assert (await work).tolist() == [1, 1, 1]
        assert work.info is not None
        assert work.info.participants == (0,)


async def test_a_view_returns_its_lease(agent: FakeAgent, aconnect: Connect) -> None:
    async with aconnect() as comm:
        view = await comm.all_reduce(np.ones(LARGE), view=True)
        part = view[3:]
        del view
        await comm.barrier()
        assert len(agent.leases) == 1
        del part
        await comm.barrier()
        assert not agent.leases


async def test_views_outlive_close(agent: FakeAgent, aconnect: Connect) -> None:
    async with aconnect() as comm:
        view = await comm.all_reduce(np.ones(LARGE), view=True)
    agent.until(lambda: agent.count(Leave) == 1)
    assert len(agent.clients) == 1
    assert view[0] == 1
    del view
    for _ in range(3):
        await asyncio.sleep(0)
    agent.until(lambda: not agent.clients)


async def test_garbage_ends_the_connection(make_agent: MakeAgent) -> None:
    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        if isinstance(message, Submit):
            client.send_bytes(b"\xff" * 100)
            return True
        return False

    async with AsyncCommunicator.connect(socket=make_agent(script).socket, job="j", rank=0, size=1) as comm:
        with pytest.raises(ProtocolError):
            await comm.all_reduce(np.ones(2))


async def test_errors_of_the_call_are_raised_at_the_call(aconnect: Connect) -> None:
    async with aconnect() as comm:
        with pytest.raises(InvalidArgument):
            comm.all_reduce(np.arange(3), op="mean")
        work = comm.all_reduce(np.ones(1), name="x", deadline=5)
        await work
        assert work.exception() is None


async def test_the_operation_fails_with_the_error_of_the_agent(agent: FakeAgent, aconnect: Connect) -> None:
    agent.hold = True
    async with aconnect() as comm:
        work = comm.barrier(name="x")
        agent.fail("x", DeadlineExceeded("late", missing=[2]))
        with pytest.raises(DeadlineExceeded) as caught:
            await work
        assert caught.value.missing == (2,)


async def test_a_refused_join_is_raised(make_agent: MakeAgent) -> None:
    from allreduced.core.errors import to_wire
    from allreduced.protocol.local import RequestFailed

    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        if isinstance(message, Join):
            client.send(RequestFailed(message.request, to_wire(RankClaimed("taken", rank=0))))
            return True
        return False

    agent = make_agent(script)
    with pytest.raises(RankClaimed, match="taken"):
        await AsyncCommunicator.connect(socket=agent.socket, job="j", rank=0, size=1)
    agent.until(lambda: agent.ended == 1)


async def test_cancelling_connect_gives_the_rank_back(agent: FakeAgent) -> None:
    connecting = AsyncCommunicator.connect(socket=agent.socket, job="j", rank=0, size=2)

    async def connect() -> None:
        await connecting

    task = asyncio.ensure_future(connect())
    await asyncio.to_thread(agent.until, lambda: agent.count(Join) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    agent.until(lambda: not agent.clients)


async def test_without_shared_memory_large_uploads_follow_from_the_loop(agent: FakeAgent) -> None:
    x = np.arange(2_000_003)
    connecting = AsyncCommunicator.connect(socket=agent.socket, job="j", rank=0, size=1, shared_memory=False)
    async with connecting as comm:
        works = [comm.all_reduce(x * i) for i in range(3)]
        for i, work in enumerate(works):
            np.testing.assert_array_equal(await work, x * i)


async def test_a_dropped_communicator_leaves(agent: FakeAgent, aconnect: Connect) -> None:
    comm = await aconnect()
    await comm.barrier()
    del comm
    gc.collect()
    agent.until(lambda: not agent.clients)
    assert agent.count(Leave) == 1


async def test_the_timeout_of_a_wait(agent: FakeAgent, aconnect: Connect) -> None:
    agent.hold = True
    async with aconnect() as comm:
        work = comm.all_reduce(np.ones(2), name="x")
        for bad in (-0.1, float("nan"), "soon"):
            with pytest.raises(InvalidArgument, match="timeout is"):
                await work.wait(timeout=bad)  # type: ignore[arg-type]  # that is the test
        with pytest.raises(WaitTimeout, match="within 0 s"):
            await work.wait(timeout=0)
        agent.complete("x")
        assert (await work.wait(timeout=float("inf"))).tolist() == [1.0, 1.0]


async def test_a_communicator_is_refused_in_another_loop(agent: FakeAgent, aconnect: Connect) -> None:
    agent.hold = True
    async with aconnect() as comm:
        work = comm.all_reduce(np.ones(1), name="x")

        async def elsewhere() -> list[str]:
            told: list[str] = []
            for call in (lambda: comm.all_reduce(np.ones(1)), work.wait, lambda: comm.empty(LARGE), comm.close):
                try:
                    await call()
                except ClosedError as error:
                    told.append(str(error))
            return told

        told = await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
        assert len(told) == 4
        assert all("another event loop" in text and "connect() in the loop" in text for text in told)
        with pytest.raises(ClosedError, match="another event loop"):
            await asyncio.to_thread(comm.barrier)  # where no loop runs at all
        agent.complete("x")
        assert (await work).tolist() == [1.0]


def test_a_communicator_outlives_its_loop_only_to_be_closed(agent: FakeAgent, aconnect: Connect) -> None:
    async def start() -> AsyncCommunicator:
        return await aconnect()

    comm = asyncio.run(start())
    with pytest.raises(ClosedError, match="loop of this communicator is closed"):
        comm.barrier()
    asyncio.run(comm.close())
    agent.until(lambda: agent.count(Leave) == 1 and not agent.clients)


def test_calls_may_be_started_between_two_runs_of_the_loop(agent: FakeAgent, aconnect: Connect) -> None:
    loop = asyncio.new_event_loop()
    try:
        comm = loop.run_until_complete(_awaited(aconnect()))
        work = comm.all_reduce(np.full(LARGE, 2.0))
        assert loop.run_until_complete(work.wait())[0] == 2.0
        loop.run_until_complete(comm.close())
    finally:
        loop.close()


async def _awaited(connecting: Connecting) -> AsyncCommunicator:
    return await connecting
