"""What users do wrong, with real agents: one clear error on every rank concerned, and everybody else computes on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import numpy as np
import pytest
from tests.integration.agents import AgentProcess, StartAgent
from tests.integration.test_links import until_logged

from allreduced.client import AsyncCommunicator, AsyncWork
from allreduced.core.errors import (
    AllReducedError,
    DeadlineExceeded,
    InvalidArgument,
    LimitExceeded,
    MismatchError,
)
from allreduced.protocol.local import Hello, Submit, encode

LOOPBACK = ("--listen", "tcp://127.0.0.1:0")
BOUND = 100.0
"""Seconds in which everything must have ended; the agents' own limits are far below."""

PLACES = (0, 0, 1, 1, 2, 2)
"""Which agent each rank is at."""


def three_agents(start_agent: StartAgent, **environment: str) -> list[AgentProcess]:
    first = start_agent("a", *LOOPBACK, **environment)
    join = first.listen.removeprefix("tcp://")
    return [first, *(start_agent(node, *LOOPBACK, "--join", join, **environment) for node in "bc")]


@contextlib.asynccontextmanager
async def group(
    agents: Sequence[AgentProcess], places: Sequence[int], job: str = "job", without_memory: Sequence[int] = ()
) -> AsyncIterator[list[AsyncCommunicator]]:
    """Form a group of one rank for each of ``places``; those of ``without_memory`` send tensors over the socket."""
    size = len(places)
    ranks = await asyncio.gather(
        *(
            AsyncCommunicator.connect(
                job=job,
                rank=rank,
                size=size,
                local_rank=0,
                local_size=1,
                socket=agents[place].socket,
                deadline=BOUND,
                shared_memory=rank not in without_memory,
            )
            for rank, place in enumerate(places)
        )
    )
    try:
        yield ranks
    finally:
        await asyncio.gather(*(rank.close() for rank in ranks))


@contextlib.asynccontextmanager
async def unharmed(agents: Sequence[AgentProcess]) -> AsyncIterator[None]:
    """Let another job on the same agents compute meanwhile, and check its results."""
    ended = asyncio.Event()

    async def compute(ranks: Sequence[AsyncCommunicator]) -> int:
        rounds = 0
        while not ended.is_set() or not rounds:
            results = await asyncio.gather(
                *(rank.all_reduce(np.full(3000, number + rounds)) for number, rank in enumerate(ranks))
            )
            assert [result.tolist() for result in results] == [[3 + 3 * rounds] * 3000] * 3
            rounds += 1
        return rounds

    async with group(agents, (0, 1, 2), "other") as ranks:
        task = asyncio.ensure_future(compute(ranks))
        try:
            yield
        finally:
            ended.set()
        assert await task > 0


async def outcomes(works: Sequence[Awaitable[object]]) -> list[AllReducedError]:
    """Return the errors that these calls end with."""
    ended = await asyncio.gather(*works, return_exceptions=True)
    errors = [error for error in ended if isinstance(error, AllReducedError)]
    assert len(errors) == len(works), ended
    return errors


async def check(ranks: Sequence[AsyncCommunicator]) -> None:
    """Unnamed calls still meet each other, with the right sum."""
    total = sum(range(len(ranks)))
    for count in (3, 5000):
        results = await asyncio.gather(*(rank.all_reduce(np.full(count, number)) for number, rank in enumerate(ranks)))
        assert [result.tolist() for result in results] == [[total] * count] * len(ranks)
    for name in (None, "list"):
        lists = await asyncio.gather(
            *(
                rank.all_reduce_many([np.ones(2, "f4"), np.array([number])], name=name)
                for number, rank in enumerate(ranks)
            )
        )
        assert [[x.tolist() for x in each] for each in lists] == [[[len(ranks)] * 2, [total]]] * len(ranks)


Call = Callable[[int, AsyncCommunicator], AsyncWork[object]]
ONES = {count: np.ones(count) for count in (12, 50_000)}


@pytest.mark.parametrize("count", ONES)
async def test_a_mismatch_is_told_to_all_ranks_with_what_each_called(start_agent: StartAgent, count: int) -> None:
    x = ONES[count]
    single = x.astype("float32")
    flat, square = f"({count},)", f"({count // 2}, 2)"
    cases: dict[str, tuple[Call, str, list[str]]] = {
        "dtype over nodes": (
            lambda rank, comm: comm.all_reduce(single if rank > 3 else x),
            "dtype",
            ["float64"] * 4 + ["float32"] * 2,
        ),
        "dtype within nodes": (
            lambda rank, comm: comm.all_reduce(single if rank % 2 else x),
            "dtype",
            ["float64", "float32"] * 3,
        ),
        "shape of one rank": (
            lambda rank, comm: comm.all_reduce(x.reshape(-1, 2) if rank == 3 else x),
            "shape",
            [flat, flat, flat, square, flat, flat],
        ),
        "op": (
            lambda rank, comm: comm.all_reduce(x, op=("sum", "min", "max")[rank // 2]),
            "op",
            ["sum", "sum", "min", "min", "max", "max"],
        ),
        "kind": (
            lambda rank, comm: comm.broadcast(x) if rank == 5 else comm.all_reduce(x),
            "kind",
            ["all_reduce"] * 5 + ["broadcast"],
        ),
        "root": (
            lambda rank, comm: comm.broadcast(x, root=rank % 3),
            "root",
            ["0", "1", "2", "0", "1", "2"],
        ),
        "algorithm": (
            lambda rank, comm: comm.all_reduce(x, algorithm="direct" if rank < 2 else None),
            "algorithm",
            ["direct"] * 2 + [""] * 4,
        ),
    }
    agents = three_agents(start_agent)
    async with asyncio.timeout(BOUND), unharmed(agents), group(agents, PLACES) as ranks:
        for case, (call, field, values) in cases.items():
            for error in await outcomes([call(number, rank) for number, rank in enumerate(ranks)]):
                assert isinstance(error, MismatchError), case
                assert (error.field, error.by_rank) == (field, dict(enumerate(values))), case
            await check(ranks)
    assert [agent.logged() for agent in agents] == ["", "", ""]


@pytest.mark.parametrize("count", ONES)
async def test_lists_that_differ_are_a_mismatch_and_later_ones_meet(start_agent: StartAgent, count: int) -> None:
    x = ONES[count]
    single = x.astype("float32")
    flat = f"({count},)"
    cases: dict[str, tuple[Call, str, list[str]]] = {
        "types in another order": (
            lambda rank, comm: comm.all_reduce_many([single, x] if rank % 2 else [x, single]),
            "shape",
            [f"float64{flat};float32{flat}", f"float32{flat};float64{flat}"] * 3,
        ),
        "fewer on some": (
            lambda rank, comm: comm.all_reduce_many([single, x] if rank < 5 else [single, single], name="list"),
            "shape",
            [f"float32{flat};float64{flat}"] * 5 + [f"{flat};{flat}"],
        ),
        "others on some": (
            lambda rank, comm: comm.all_reduce_many([single, x] if rank else [single, x.astype("int64")], name="list"),
            "shape",
            [f"float32{flat};int64{flat}"] + [f"float32{flat};float64{flat}"] * 5,
        ),
        "an empty list on some": (
            lambda rank, comm: comm.all_reduce_many([x, single] if rank != 2 else []),
            "shape",
            [f"float64{flat};float32{flat}"] * 2 + [""] + [f"float64{flat};float32{flat}"] * 3,
        ),
    }
    agents = three_agents(start_agent)
    async with asyncio.timeout(BOUND), unharmed(agents), group(agents, PLACES) as ranks:
        for case, (call, field, values) in cases.items():
            for error in await outcomes([call(number, rank) for number, rank in enumerate(ranks)]):
                assert isinstance(error, MismatchError), case
                assert (error.field, error.by_rank) == (field, dict(enumerate(values))), case
            await check(ranks)
    assert [agent.logged() for agent in agents] == ["", "", ""]


async def test_a_rank_that_does_not_come_is_named_on_all_others_and_learns_it_later(start_agent: StartAgent) -> None:
    agents = three_agents(start_agent)
    async with asyncio.timeout(BOUND), unharmed(agents), group(agents, PLACES) as ranks:
        for count, late in ((12, (1, 4)), (50_000, (0,))):
            x = ONES[count]
            works = [rank.all_reduce(x, deadline=3.0) for number, rank in enumerate(ranks) if number not in late]
            works += [ranks[number].all_reduce(x) for number in late if await outcomes(works)]
            for error in await outcomes(works):
                assert isinstance(error, DeadlineExceeded)
                assert error.missing == late
            await check(ranks)


@pytest.mark.parametrize("places", [(0, 0, 0), (0, 1, 2)], ids=["one node", "three nodes"])
async def test_a_call_over_a_limit_of_one_rank_fails_on_all_and_the_next_ones_meet(
    start_agent: StartAgent, places: Sequence[int]
) -> None:
    agents = three_agents(start_agent, ALLREDUCED_LIMITS_REQUESTS="3")
    async with asyncio.timeout(BOUND), unharmed(agents), group(agents, places) as ranks:
        calls = [[rank.all_reduce(np.full(9, number)) for number in range(5)] for rank in ranks[1:]]
        # Else the first ones could end, and make room, before the last ones are read.
        refused = await outcomes([work for works in calls for work in works[3:]])
        mine = [
            (await asyncio.gather(ranks[0].all_reduce(np.full(9, number)), return_exceptions=True))[0]
            for number in range(5)
        ]
        assert [result.tolist() for result in mine[:3] if isinstance(result, np.ndarray)] == [
            [3 * number] * 9 for number in range(3)
        ]
        for error in [*mine[3:], *refused]:
            assert isinstance(error, LimitExceeded)
            assert error.limit == "limits.requests"
            assert "was refused" in error.message
        await check(ranks)


@pytest.mark.parametrize("without_memory", [(), (1,)], ids=["shared memory", "over the socket"])
async def test_a_tensor_that_no_agent_has_room_for_is_a_limit_on_all_ranks(
    start_agent: StartAgent, without_memory: Sequence[int]
) -> None:
    agents = three_agents(start_agent, ALLREDUCED_LIMITS_ARENA_BYTES="32MiB")
    async with asyncio.timeout(BOUND), unharmed(agents), group(agents, (0, 0, 1), "job", without_memory) as ranks:
        for count in (5 << 20, 30 << 20):
            x = np.ones(count, "float32")
            for error in await outcomes([rank.all_reduce(x) for rank in ranks]):
                assert isinstance(error, LimitExceeded)
                assert error.limit.startswith("limits.arena_bytes")
            await check(ranks)


async def test_wrong_calls_of_one_rank_are_errors_of_that_call_only(start_agent: StartAgent) -> None:
    agents = three_agents(start_agent)
    readonly = np.ones(12)
    readonly.flags.writeable = False
    async with asyncio.timeout(BOUND), unharmed(agents), group(agents, PLACES) as ranks:
        comm = ranks[3]
        wrong: list[tuple[Callable[[], object], str]] = [
            (lambda: comm.all_reduce(np.zeros(3, "datetime64[s]")), "there are .*float32, float64"),
            (lambda: comm.all_reduce(np.ones(3), op="median"), "there are sum, mean, prod, min, max"),
            (lambda: comm.all_reduce(np.ones(3, "int32"), op="mean"), "mean of int32 is not defined"),
            (lambda: comm.all_reduce(np.ones(12), out=readonly), "out is read-only"),
            (lambda: comm.broadcast(np.ones(3), root=6), "with size 6 it is 0 to 5"),
        ]
        for call, says in wrong:
            with pytest.raises(InvalidArgument, match=says):
                call()
        await check(ranks)
        strided = np.arange(60_000.0).reshape(300, 200).T[::2]
        results = await asyncio.gather(*(rank.all_reduce(strided) for rank in ranks))
        assert all(np.array_equal(result, 6 * strided) for result in results)


async def test_clients_that_end_in_the_middle_of_a_message_disturb_nobody(start_agent: StartAgent) -> None:
    agents = three_agents(start_agent)
    hello = encode(Hello(1, 1, 1, True))
    submit = encode(Submit(3, 1, "all_reduce", "", 1, 1, "(4,)", 4, -1, 0, 0.0, "", bytes(16), -1, 0, False, False))
    async with asyncio.timeout(BOUND), unharmed(agents), group(agents, PLACES) as ranks:
        for end in (1, 4, 20, len(submit) - 1):
            with socket.socket(socket.AF_UNIX) as stray:
                stray.connect(f"\0{agents[0].socket[1:]}")
                stray.sendall(hello + submit[:end])
        await check(ranks)
        await until_logged(agents[0], "event=client_dropped", 4)
    assert agents[0].logged().count("event=client_dropped") == 4
