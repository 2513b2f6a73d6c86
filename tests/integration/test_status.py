"""`allreduced status` on real agents: who is missing, and since when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
import pytest
from tests.integration.agents import AgentProcess, StartAgent
from tests.support.proxy import Proxied, name

from allreduced.cli.cluster_merge import put_together
from allreduced.cli.cluster_text import lines
from allreduced.cli.cluster_view import ClusterView, GroupView, OperationView
from allreduced.client import AsyncCommunicator
from allreduced.client.inquiry import ask_status
from allreduced.core.addresses import parse_socket
from allreduced.core.errors import AgentUnavailable, AllReducedError, MismatchError

LOOPBACK = ("--listen", "tcp://127.0.0.1:0")
BOUND = 60.0
"""Seconds in which everything must have happened; nothing waits that long."""


def two_agents(start_agent: StartAgent, **environment: str) -> tuple[AgentProcess, AgentProcess]:
    first = start_agent("a", *LOOPBACK, **environment)
    return first, start_agent("b", *LOOPBACK, "--join", first.listen.removeprefix("tcp://"), **environment)


async def join(agent: AgentProcess, rank: int, job: str = "job") -> AsyncCommunicator:
    return await AsyncCommunicator.connect(
        job=job, rank=rank, size=4, local_rank=rank % 2, local_size=2, socket=agent.socket, deadline=BOUND
    )


@contextlib.asynccontextmanager
async def ranks_on(a: AgentProcess, b: AgentProcess) -> AsyncIterator[list[AsyncCommunicator]]:
    """Form the group of ranks 0 and 1 on a, 2 and 3 on b."""
    ranks = await asyncio.gather(*(join(agent, rank) for rank, agent in enumerate((a, a, b, b))))
    try:
        yield ranks
    finally:
        await asyncio.gather(*(rank.close() for rank in ranks))


def status(agent: AgentProcess) -> ClusterView:
    told = ask_status(parse_socket(agent.socket), path="test", others=True, timeout=BOUND)
    return put_together(told.reports, told.unanswered)


async def shows(agent: AgentProcess, found: Callable[[ClusterView], bool]) -> ClusterView:
    """Ask an agent again and again until its answer is what was looked for, and return that."""
    async with asyncio.timeout(BOUND):
        while True:
            view = await asyncio.to_thread(status, agent)
            if found(view):
                return view


def group_of(view: ClusterView) -> GroupView:
    [group] = view.groups
    return group


def arrived(*ranks: int) -> Callable[[ClusterView], bool]:
    """Return whether exactly these ranks have called the only operation."""

    def found(view: ClusterView) -> bool:
        operations = [operation for group in view.groups for operation in group.operations]
        return [{one.rank for one in operation.arrivals} for operation in operations] == [set(ranks)]

    return found


def only_operation(view: ClusterView) -> OperationView:
    [operation] = group_of(view).operations
    return operation


async def test_a_rank_that_never_called_is_named_by_every_agent(start_agent: StartAgent) -> None:
    a, b = two_agents(start_agent)
    async with asyncio.timeout(BOUND), ranks_on(a, b) as ranks:
        works = [asyncio.ensure_future(ranks[1].all_reduce(np.ones((3, 4), "float32"), name="w"))]
        # Reports of two agents are put together: what is a good while apart is told in its order.
        await shows(a, lambda view: arrived(1)(view) and only_operation(view).age > 0.5)
        works += [
            asyncio.ensure_future(ranks[rank].all_reduce(np.ones((3, 4), "float32"), name="w")) for rank in (0, 2)
        ]
        for agent, node in ((a, "a"), (b, "b")):
            view = await shows(agent, arrived(0, 1, 2))
            assert (view.asked, [one.node for one in view.agents], view.unanswered) == (
                node,
                [node, "ab"["ba".index(node)]],
                (),
            )
            operation = only_operation(view)
            assert (operation.name, operation.use, operation.missing, operation.unknown) == ("w", 0, (3,), ())
            assert operation.arrivals[0].rank == 1  # the order in which they came; times are those of one machine
            assert operation.arrivals[0].ago == operation.age > 0
            assert operation.deadline is not None
            assert 0 < operation.deadline < 300
            [call] = operation.calls
            assert (call.kind, call.op, call.dtype, call.shape, call.nbytes) == (
                *("all_reduce", "sum", "float32", "(3, 4)", 48),
            )
            assert "waits for rank 3" in "\n".join(lines(view))
        works.append(asyncio.ensure_future(ranks[3].all_reduce(np.ones((3, 4), "float32"), name="w")))
        assert [float(result.sum()) for result in await asyncio.gather(*works)] == [48.0] * 4
        view = await shows(a, lambda view: not group_of(view).operations)
        group = group_of(view)
        assert (group.job, group.name, group.uid, group.state, group.generation) == (
            *("job", "world", os.geteuid(), "running", 1),
        )
        assert [(member.node, member.ranks) for member in group.members] == [("a", (0, 1)), ("b", (2, 3))]
        assert {(rank.pid, rank.uid, rank.state) for rank in group.ranks} == {(os.getpid(), os.geteuid(), "running")}


async def test_operations_whose_names_differ_wait_for_each_other(start_agent: StartAgent) -> None:
    a, b = two_agents(start_agent)
    async with asyncio.timeout(BOUND), ranks_on(a, b) as ranks:
        names = ["x", "x", "x", "y"]
        works = [
            asyncio.ensure_future(rank.all_reduce(np.ones(4), name=name))
            for rank, name in zip(ranks, names, strict=True)
        ]
        view = await shows(b, lambda view: sum(len(one.arrivals) for one in group_of(view).operations) == 4)
        missing = {operation.name: operation.missing for operation in group_of(view).operations}
        assert missing == {"x": (3,), "y": (0, 1, 2)}
        works += [asyncio.ensure_future(rank.all_reduce(np.ones(4), name="y")) for rank in ranks[:3]]
        works.append(asyncio.ensure_future(ranks[3].all_reduce(np.ones(4), name="x")))
        await asyncio.gather(*works)


RANK = """
import sys
import numpy as np
from allreduced.client import connect
comm = connect(job="job", rank=3, size=4, local_rank=1, local_size=2, socket=sys.argv[1])
print("joined", flush=True)
sys.stdin.readline()
comm.all_reduce(np.ones(4), name="w")
comm.close()
"""


@contextlib.contextmanager
def last_rank(agent: AgentProcess) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that takes rank 3 and calls "w" when it is told to."""
    command = (sys.executable, "-c", RANK, agent.socket)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


async def test_a_stopped_process_is_named_with_its_pid(start_agent: StartAgent) -> None:
    agents = two_agents(start_agent)
    with last_rank(agents[1]) as child:
        async with asyncio.timeout(BOUND):
            ranks = await asyncio.gather(*(join(agents[rank // 2], rank) for rank in range(3)))
            assert child.stdout is not None
            assert child.stdin is not None
            assert await asyncio.to_thread(child.stdout.readline) == b"joined\n"
            works = [asyncio.ensure_future(rank.all_reduce(np.ones(4), name="w")) for rank in ranks]
            child.send_signal(signal.SIGSTOP)
            for agent in agents:
                view = await shows(
                    agent, lambda view: arrived(0, 1, 2)(view) and group_of(view).ranks[3].state == "stopped"
                )
                assert only_operation(view).missing == (3,)
                assert group_of(view).ranks[3].pid == child.pid
                said = f"waits for rank 3 (pid {child.pid} on b, stopped), which has not called it"
                assert said in "\n".join(lines(view))
            child.send_signal(signal.SIGCONT)
            child.stdin.write(b"go on\n")
            child.stdin.flush()
            assert [result.tolist() for result in await asyncio.gather(*works)] == [[4.0] * 4] * 3
            await asyncio.gather(*(rank.close() for rank in ranks))


async def test_a_killed_process_leaves_a_group_that_says_why_it_is_broken(start_agent: StartAgent) -> None:
    agents = two_agents(start_agent)
    with last_rank(agents[1]) as child:
        async with asyncio.timeout(BOUND):
            ranks = await asyncio.gather(*(join(agents[rank // 2], rank) for rank in range(3)))
            child.kill()
            view = await shows(agents[0], lambda view: {m.state for m in group_of(view).members} == {"broken"})
            group = group_of(view)
            assert (group.state, group.error) == ("broken", "rank_lost")
            assert "rank 3" in group.reason
            assert str(child.pid) in group.reason
            assert group.ranks[3].state == "gone"
            assert f"  rank_lost: {group.reason}" in lines(view)
            await asyncio.gather(*(rank.close() for rank in ranks))


async def test_ranks_that_called_something_else_are_told(start_agent: StartAgent) -> None:
    a, b = two_agents(start_agent)
    async with asyncio.timeout(BOUND), ranks_on(a, b) as ranks:
        works = [
            asyncio.ensure_future(ranks[rank].all_reduce(np.ones(count), name="w")) for rank, count in ((0, 4), (2, 5))
        ]
        # Seen here before the agents themselves have compared anything.
        view = await shows(b, lambda view: any(len(one.calls) == 2 for one in group_of(view).operations))
        operation = only_operation(view)
        assert [(call.shape, call.ranks) for call in operation.calls] == [("(4,)", (0,)), ("(5,)", (2,))]
        assert operation.missing == (1, 3)
        assert "      rank 2: all_reduce sum float64 (5,), 40 B" in lines(view)
        # Then it fails, and the one that has not called it is still named.
        works.append(asyncio.ensure_future(ranks[1].all_reduce(np.ones(4), name="w")))
        view = await shows(a, lambda view: [one.waiting for one in group_of(view).failed] == [(3,)])
        [failed] = group_of(view).failed
        assert (failed.name, failed.error) == ("w", "mismatch")
        assert "(5,)" in failed.reason
        assert "  operation 'w' (use 0) failed; rank 3 has not called it yet" in lines(view)
        works.append(asyncio.ensure_future(ranks[3].all_reduce(np.ones(4), name="w")))
        errors = await asyncio.gather(*works, return_exceptions=True)
        assert all(isinstance(error, MismatchError) for error in errors)
        await shows(a, lambda view: not group_of(view).failed)


async def test_a_stopped_agent_is_told_as_one_that_does_not_answer(start_agent: StartAgent) -> None:
    a, b = two_agents(start_agent, ALLREDUCED_FAILURE_FAILURE_TIMEOUT="20.0")
    async with asyncio.timeout(BOUND), ranks_on(a, b) as ranks:
        works = [asyncio.ensure_future(rank.all_reduce(np.ones(4), name="w")) for rank in ranks[:2]]
        await shows(a, arrived(0, 1))
        b.process.send_signal(signal.SIGSTOP)
        try:
            view = await asyncio.to_thread(status, a)
            [unanswered] = view.unanswered
            assert unanswered.node == "b"
            assert "did not answer within 2 s; last heard of" in unanswered.reason
            operation = only_operation(view)
            assert (operation.missing, operation.unknown) == ((), (2, 3))
            assert [rank.state for rank in group_of(view).ranks] == ["running", "running", "unknown", "unknown"]
            assert "    waits for ranks 2-3: not known, the agent of b did not answer about it" in lines(view)
            with pytest.raises(AgentUnavailable, match="does not answer"):
                await asyncio.to_thread(ask_status, parse_socket(b.socket), path="test", others=True, timeout=0.2)
        finally:
            b.process.send_signal(signal.SIGCONT)
        works += [asyncio.ensure_future(rank.all_reduce(np.ones(4), name="w")) for rank in ranks[2:]]
        assert [result.tolist() for result in await asyncio.gather(*works)] == [[4.0] * 4] * 4


async def test_a_cut_link_is_told_by_both_sides(start_agent: StartAgent) -> None:
    with contextlib.closing(Proxied(2)) as network:
        agents = []
        for node in range(2):
            agents.append(start_agent(name(node), *network.arguments(node)))
            network.started(node, agents[node].listen)
        a, b = agents
        async with asyncio.timeout(BOUND):
            ranks = await asyncio.gather(*(join(agent, rank) for rank, agent in enumerate((a, a, b, b))))
            works = [asyncio.ensure_future(ranks[rank].all_reduce(np.ones(4), name="w")) for rank in (0, 1, 2)]
            await shows(a, arrived(0, 1, 2))
            network.cut(0, 1)
            for agent, other in ((a, b), (b, a)):
                view = await shows(agent, lambda view: bool(view.unanswered))
                assert [one.node for one in view.unanswered] == [other.node]
                assert [one.node for one in view.agents] == [agent.node]
                group = group_of(view)
                assert {member.node: member.state for member in group.members}[other.node] == "unknown"
                if group.state == "broken":
                    assert other.node in group.reason
                elif agent is a:  # not given up yet
                    assert 3 in only_operation(view).unknown
                else:  # it may have heard before that ranks 0 and 1 called
                    assert only_operation(view).missing == (3,)
            errors = await asyncio.gather(*works, return_exceptions=True)
            assert all(isinstance(error, AllReducedError) for error in errors)
            await asyncio.gather(*(rank.close() for rank in ranks))
        for agent in agents:
            agent.stop()


async def test_a_group_that_gathers_names_those_that_did_not_connect(start_agent: StartAgent) -> None:
    a, b = two_agents(start_agent)
    async with asyncio.timeout(BOUND):
        joining = [asyncio.ensure_future(join(agent, rank)) for agent, rank in ((a, 0), (b, 2))]
        for agent in (b, a):
            view = await shows(agent, lambda view: [len(one.claims) for one in view.gatherings] == [2])
            [gathering] = view.gatherings
            assert (gathering.job, gathering.name, gathering.size, gathering.missing) == ("job", "world", 4, (1, 3))
            assert [(claim.rank, claim.node, claim.pid) for claim in gathering.claims] == [
                (0, "a", os.getpid()),
                (2, "b", os.getpid()),
            ]
            assert view.groups == ()
        joining += [asyncio.ensure_future(join(agent, rank)) for agent, rank in ((a, 1), (b, 3))]
        ranks = await asyncio.gather(*joining)
        view = await shows(a, lambda view: not view.gatherings)
        assert group_of(view).size == 4
        await asyncio.gather(*(rank.close() for rank in ranks))


def run(*arguments: str) -> tuple[int, str, str]:
    """Run the command and return status, output and errors."""
    command = (sys.executable, "-P", "-m", "allreduced.cli.main", "status", *arguments)
    ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=BOUND)
    return ended.returncode, ended.stdout, ended.stderr


async def writes(found: Callable[[str], bool], *arguments: str) -> str:
    """Run the command again and again until it writes what is looked for: an agent without time is left out."""
    async with asyncio.timeout(BOUND):
        while True:
            code, out, err = await asyncio.to_thread(run, *arguments)
            assert (code, err) == (0, "")
            if found(out):
                return out


def missing(out: str) -> list[int]:
    """Return who the only operation of a JSON answer waits for, by all that is known."""
    (operation,) = json.loads(out)["groups"][0]["operations"]
    ranks: list[int] = operation["missing"]
    return ranks


async def test_the_command_writes_text_and_json(start_agent: StartAgent) -> None:
    a, b = two_agents(start_agent)
    async with asyncio.timeout(BOUND), ranks_on(a, b) as ranks:
        works = [asyncio.ensure_future(rank.all_reduce(np.ones(4), name="w")) for rank in ranks[:3]]
        await shows(a, arrived(0, 1, 2))
        waits = f"waits for rank 3 (pid {os.getpid()} on b, running), which has not called it"
        await writes(lambda out: waits in out, "--socket", a.socket)
        out = await writes(lambda out: missing(out) == [3], "--socket", b.socket, "--json")
        assert json.loads(out)["asked"] == "b"
        found = json.loads(await writes(lambda _: True, "--socket", a.socket, "--json", "--local"))
        assert [agent["node"] for agent in found["agents"]] == ["a"]
        (operation,) = found["groups"][0]["operations"]
        assert ([one["rank"] for one in operation["arrivals"]], operation["missing"]) == ([0, 1], [])
        # Whether rank 2 called, a need not have heard yet: it is told of ranks elsewhere only after a while.
        assert operation["unknown"] in ([3], [2, 3])
        works.append(asyncio.ensure_future(ranks[3].all_reduce(np.ones(4), name="w")))
        await asyncio.gather(*works)
    assert [agent.stop() for agent in (a, b)] == [0, 0]
    assert [agent.logged() for agent in (a, b)] == ["", ""]


def test_no_agent_is_status_1() -> None:
    name = f"@allreduced-test-{secrets.token_hex(8)}"
    code, out, err = run("--socket", name)
    assert (code, out) == (1, "")
    assert f"allreduced: error: no agent answers at {name}: nobody listens there" in err
