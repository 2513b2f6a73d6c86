"""Clients that ask an agent what runs."""

from __future__ import annotations

import asyncio
import os

import pytest
from tests.support.local_plane import PATIENCE, Plane, open_plane, submit
from tests.support.other_user import STRANGER, as_user, only_root
from tests.support.reports import REPORT, agent

from allreduced.core.errors import AuthenticationError, ProtocolError, from_wire
from allreduced.daemon.access import Access
from allreduced.daemon.lifetime import Lifetime
from allreduced.daemon.membership.events import ClientGone, ClientJoining
from allreduced.daemon.ports import ReachablePeer
from allreduced.daemon.status import StatusService
from allreduced.protocol import local
from allreduced.protocol.peer import Frame, Status, StatusRequest
from allreduced.protocol.status import AgentReport, ReachReport, UnansweredReport


class OnePeer:
    """A peer plane with the agent b, which answers when the test says so."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = nodes
        self.sent: list[tuple[str, Frame]] = []
        self.asked = asyncio.Event()

    def view(self) -> tuple[ReachablePeer, ...]:
        return tuple(ReachablePeer(node, ord(node), f"tcp://{node}:1", "", 0.5) for node in self.nodes)

    def not_reached(self) -> tuple[tuple[str, str], ...]:
        return ()

    def send_frame(self, node: str, frame: Frame) -> None:
        self.sent.append((node, frame))
        if len(self.sent) == len(self.nodes):
            self.asked.set()


def service(plane: Plane, *nodes: str) -> tuple[StatusService, OnePeer, list[int]]:
    """Let the clients of a plane ask a status service; return it, its peers, and the uids that asked."""
    peers, uids = OnePeer(*nodes), []

    def report(uid: int) -> AgentReport:
        uids.append(uid)
        return REPORT

    made = StatusService(report, peers, wait=1000.0, clock=lambda: 7.0)
    plane.server.use_status(made)
    return made, peers, uids


async def test_the_agent_that_is_asked_tells_its_own_report_first_and_who_did_not_answer_last() -> None:
    async with open_plane() as plane:
        made, peers, uids = service(plane, "b", "c")
        client = await plane.attach()
        await client.send(local.AskStatus(5, True))
        await asyncio.wait_for(peers.asked.wait(), PATIENCE)
        assert uids == [os.geteuid()]
        assert peers.sent == [("b", StatusRequest(1, os.geteuid())), ("c", StatusRequest(1, os.geteuid()))]
        made.frame_arrived("c", Status(1, agent("c")))
        made.frame_arrived("b", Status(1, agent("b")))
        told = [await client.receive(local.AgentStatus) for _ in range(3)]
        assert [one.report.node for one in told] == ["a", "b", "c"]
        assert {one.request for one in told} == {5}
        assert told[0].report == REPORT
        assert await client.receive(local.StatusEnd) == local.StatusEnd(5, ())
        made.close()


async def test_a_client_may_ask_again_and_without_the_others() -> None:
    async with open_plane() as plane:
        service(plane, "b")
        client = await plane.attach()
        for request in (1, 2):
            await client.send(local.AskStatus(request, False))
            assert (await client.receive(local.AgentStatus)).request == request
            assert await client.receive(local.StatusEnd) == local.StatusEnd(request, ())


async def test_a_second_question_before_the_answer_is_refused() -> None:
    async with open_plane() as plane:
        made, _, _ = service(plane, "b")
        client = await plane.attach()
        await client.send(local.AskStatus(1, True), local.AskStatus(2, True))
        refused = await client.receive(local.Refused)
        assert isinstance(from_wire(refused.error), ProtocolError)
        assert "again before the answer" in refused.error[1]
        made.frame_arrived("b", Status(1, agent("b")))  # whoever asked is gone: nothing happens


async def test_root_may_look_where_it_may_not_attach() -> None:
    async with open_plane(access=Access(1 << 31, observers=frozenset({os.geteuid()}))) as plane:
        service(plane)
        client = await plane.attach()
        await client.send(local.AskStatus(1, True))
        assert (await client.receive(local.AgentStatus)).report == REPORT
        await client.receive(local.StatusEnd)
        await client.send(local.Join(2, "job", "world", 0, 1, 0, 30.0, 0.0))
        refused = await client.receive(local.Refused)
        assert isinstance(from_wire(refused.error), AuthenticationError)
        assert "for nothing else" in refused.error[1]
        assert not any(isinstance(event, ClientJoining) for event in plane.sink.membership)


@only_root
@pytest.mark.parametrize(("uid", "probes"), [(0, [False]), (STRANGER, [])])
async def test_agents_dial_each_other_for_those_who_run_them_only(uid: int, probes: list[bool]) -> None:
    asked: list[bool] = []

    async def probe(bandwidth: bool) -> tuple[ReachReport, ...]:
        asked.append(bandwidth)
        return ()

    async with open_plane(access=Access(0, everybody=True)) as plane:
        plane.server.use_status(
            StatusService(lambda uid: REPORT, OnePeer(), wait=1000.0, probe=probe, clock=lambda: 7.0)
        )
        with as_user(uid):
            client = plane.connect()
        await client.hello()
        await client.send(local.AskStatus(1, True, 1))
        assert (await client.receive(local.AgentStatus)).report == REPORT
    assert asked == probes


@pytest.mark.parametrize("looks", [True, False])
async def test_a_private_agent_does_not_end_because_somebody_looked(looks: bool) -> None:
    async with open_plane() as plane:
        service(plane)
        end = asyncio.Event()
        lifetime = Lifetime(end.set, first_client=1000.0, linger=0.0)
        plane.server.report_to(lifetime)
        client = await plane.attach()
        await client.send(local.AskStatus(1, True))
        await client.receive(local.AgentStatus)
        await client.receive(local.StatusEnd)
        assert plane.server.served == 0
        if not looks:
            await client.send(submit(2))
            await client.receive(local.RequestFailed)
            assert plane.server.served == 1
        client.close()
        await plane.sink.told(ClientGone)
        if looks:
            await asyncio.sleep(0)
            assert not end.is_set()
        else:
            await asyncio.wait_for(end.wait(), PATIENCE)
        lifetime.close()


async def test_the_process_of_a_client_is_known_while_it_is_connected() -> None:
    async with open_plane() as plane:
        client, number = await plane.join()
        assert plane.server.process_of(number) == os.getpid()
        client.close()
        await plane.sink.told(ClientGone)
        assert plane.server.process_of(number) == 0


async def test_clients_of_version_1_are_served() -> None:
    async with open_plane() as plane:
        client = plane.connect()
        await client.send(local.Hello(1, 1, os.getpid(), True))
        assert (await client.receive(local.Welcome)).version == 1


async def test_unanswered_agents_are_named() -> None:
    async with open_plane() as plane:
        peers = OnePeer("b")
        plane.server.use_status(StatusService(lambda uid: agent("a"), peers, wait=0.0))
        client = await plane.attach()
        await client.send(local.AskStatus(1, True))
        await client.receive(local.AgentStatus)
        reason = "did not answer within 0 s; last heard of 0.5 s ago"
        assert await client.receive(local.StatusEnd) == local.StatusEnd(1, (UnansweredReport("b", reason),))
