"""Asking other agents, for a bounded time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.support.reports import GATHERING, agent, group_at, operation

from allreduced.core.limits import MAX_SECONDS
from allreduced.daemon.ports import ReachablePeer
from allreduced.daemon.status import Answer, StatusService, probe_wait, status_wait
from allreduced.protocol.peer import Frame, Status, StatusRequest
from allreduced.protocol.status import AgentReport, ReachReport, UnansweredReport

PATIENCE = 30.0


class Peers:
    def __init__(self, *nodes: str, lost: tuple[tuple[str, str], ...] = ()) -> None:
        self.up = list(nodes)
        self.lost = lost
        self.sent: list[tuple[str, Frame]] = []
        self.sending = asyncio.Event()

    def view(self) -> tuple[ReachablePeer, ...]:
        return tuple(ReachablePeer(node, 1, "", "", 3.0) for node in self.up)

    def not_reached(self) -> tuple[tuple[str, str], ...]:
        return self.lost

    def send_frame(self, node: str, frame: Frame) -> None:
        self.sent.append((node, frame))
        self.sending.set()


def nodes(answer: Answer) -> list[str]:
    return [report.node for report in answer.reports]


@pytest.mark.parametrize(("timeout", "wait"), [(5.0, 1.25), (0.2, 0.05), (3600.0, 2.0)])
def test_the_wait_follows_from_the_failure_timeout(timeout: float, wait: float) -> None:
    assert status_wait(timeout) == wait


@pytest.mark.parametrize(
    ("others", "probe", "wait"),
    [(0, 1, 7.25), (3, 1, 7.25), (1, 2, 2 * 9.25), (3, 2, 4 * 13.25), (50, 2, 60.0)],
)
def test_how_long_agents_are_waited_for_that_dial_each_other(others: int, probe: int, wait: float) -> None:
    assert probe_wait(1.25, others, probe) == wait


def test_an_agent_alone_answers_at_once() -> None:
    answers: list[Answer] = []
    service = StatusService(lambda uid: agent("a"), Peers(), wait=1.0)
    service.ask(7, answers.append, others=True)
    assert answers == [Answer((agent("a"),), ())]


async def test_answers_are_told_as_soon_as_all_are_there() -> None:
    answers: list[Answer] = []
    peers = Peers("c", "b")
    service = StatusService(lambda uid: agent("a"), peers, wait=1000.0)
    service.ask(7, answers.append, others=True)
    assert peers.sent == [("b", StatusRequest(1, 7)), ("c", StatusRequest(1, 7))]
    service.frame_arrived("c", Status(1, agent("c")))
    assert answers == []
    service.frame_arrived("b", Status(1, agent("b")))
    assert [nodes(answer) for answer in answers] == [["a", "b", "c"]]
    assert answers[0].unanswered == ()


async def test_reports_that_were_made_one_after_the_other_tell_of_the_moment_of_the_answer() -> None:
    answers: list[Answer] = []
    peers = Peers("b", "c")
    first, never = operation((0, 1.0), missing=(1, 2, 3)), operation(missing=(0, 1, 2, 3))
    own = replace(agent("a", group_at("a", first, never)), gatherings=(GATHERING,))
    now = [100.0]
    service = StatusService(lambda uid: own, peers, wait=1000.0, clock=lambda: now[0])
    service.ask(7, answers.append, others=True)
    now[0] += 2.0
    endless = replace(operation((2, 2.5), missing=(3,)), deadline=MAX_SECONDS)
    service.frame_arrived("b", Status(1, agent("b", group_at("b", endless))))
    now[0] += 0.25
    service.frame_arrived("c", Status(1, agent("c", group_at("b", replace(first, deadline=0.125)))))
    [answer] = answers
    told = [operation for report in answer.reports for group in report.groups for operation in group.operations]
    assert [operation.arrivals for operation in told] == [((0, 3.25),), (), ((2, 2.75),), ((0, 1.0),)]
    assert [operation.age for operation in told] == [3.25, 0.0, 2.75, 1.0]
    assert [operation.deadline for operation in told] == [
        *(max(first.deadline - 2.25, 0.0), max(never.deadline - 2.25, 0.0), MAX_SECONDS, 0.125)
    ]
    [gathering] = answer.reports[0].gatherings
    assert [claim.waits for claim in gathering.claims] == [GATHERING.claims[0].waits + 2.25]


async def test_answers_that_nobody_waits_for_are_ignored() -> None:
    answers: list[Answer] = []
    service = StatusService(lambda uid: agent("a"), Peers("b"), wait=1000.0)
    service.frame_arrived("b", Status(1, agent("b")))
    service.ask(7, answers.append, others=True)
    service.frame_arrived("c", Status(1, agent("c")))  # it was not asked
    service.frame_arrived("b", Status(1, agent("c")))  # another one's report
    service.frame_arrived("b", Status(2, agent("b")))
    assert answers == []
    service.frame_arrived("b", Status(1, agent("b")))
    service.frame_arrived("b", Status(1, agent("b")))
    assert [nodes(answer) for answer in answers] == [["a", "b"]]


async def test_agents_that_do_not_answer_are_named_with_the_reason() -> None:
    found: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    peers = Peers("b", "d", lost=(("c", "lost 7.0 s ago: agent 'c' was silent for 5.0 s"), ("", "not at tcp://x:1")))
    service = StatusService(lambda uid: agent("a", group_at("a")), peers, wait=0.0)
    service.ask(7, found.set_result, others=True)
    peers.up.remove("d")
    answer = await asyncio.wait_for(found, PATIENCE)
    assert nodes(answer) == ["a"]
    assert answer.unanswered == (
        UnansweredReport("b", "did not answer within 0 s; last heard of 3.0 s ago"),
        UnansweredReport("c", "lost 7.0 s ago: agent 'c' was silent for 5.0 s"),
        UnansweredReport("d", "its link was lost while it was asked"),
        UnansweredReport("", "not at tcp://x:1"),
    )


def test_a_member_without_a_link_is_named() -> None:
    answers: list[Answer] = []
    service = StatusService(lambda uid: agent("a", group_at("a")), Peers(), wait=1.0)
    service.ask(7, answers.append, others=True)
    assert answers[0].unanswered == (UnansweredReport("b", "there is no link to it"),)
    service.ask(7, answers.append, others=False)
    assert answers[1].unanswered == ()


def test_other_agents_are_answered_for_their_user() -> None:
    uids: list[int] = []

    def report(uid: int) -> AgentReport:
        uids.append(uid)
        return agent("a")

    peers = Peers("b")
    StatusService(report, peers, wait=1.0).frame_arrived("b", StatusRequest(9, 1001))
    assert (peers.sent, uids) == ([("b", Status(9, agent("a")))], [1001])


def test_a_defect_in_a_report_does_not_reach_the_link(caplog: pytest.LogCaptureFixture) -> None:
    def report(uid: int) -> AgentReport:
        raise KeyError(uid)

    peers = Peers("b")
    StatusService(report, peers, wait=1.0).frame_arrived("b", StatusRequest(9, 1001))
    assert peers.sent == []
    assert "event=defect" in caplog.text


async def test_nothing_is_told_after_the_end() -> None:
    answers: list[Answer] = []
    service = StatusService(lambda uid: agent("a"), Peers("b"), wait=0.0)
    service.ask(7, answers.append, others=True)
    service.close()
    await asyncio.sleep(0)
    service.frame_arrived("b", Status(1, agent("b")))
    assert answers == []


def reach_of(node: str) -> tuple[ReachReport, ...]:
    return (ReachReport(node, f"tcp://{node}:1", "reached", "", 0.1, 0),)


async def test_a_probe_is_asked_of_all_at_once_and_told_in_the_reports() -> None:
    answers: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    asked: list[bool] = []

    async def probe(bandwidth: bool) -> tuple[ReachReport, ...]:
        asked.append(bandwidth)
        return reach_of("b")

    peers = Peers("b", "c")
    service = StatusService(lambda uid: agent("a"), peers, wait=1000.0, probe=probe)
    service.ask(7, answers.set_result, others=True, probe=1)
    assert peers.sent == [("b", StatusRequest(1, 7, 1)), ("c", StatusRequest(1, 7, 1))]
    for node in ("b", "c"):
        service.frame_arrived(node, Status(1, replace(agent(node), reach=reach_of("a"))))
    async with asyncio.timeout(PATIENCE):
        answer = await answers
    assert asked == [False]
    assert [report.reach for report in answer.reports] == [reach_of("b"), reach_of("a"), reach_of("a")]


async def test_links_are_measured_by_one_agent_after_the_other() -> None:
    answers: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    measuring, measured = asyncio.Event(), asyncio.Event()

    async def probe(bandwidth: bool) -> tuple[ReachReport, ...]:
        measuring.set()
        await measured.wait()
        return ()

    peers = Peers("b", "c")
    service = StatusService(lambda uid: agent("a"), peers, wait=1000.0, probe=probe)
    service.ask(7, answers.set_result, others=True, probe=2)
    async with asyncio.timeout(PATIENCE):
        await measuring.wait()
        assert peers.sent == []
        measured.set()
        await peers.sending.wait()
        assert peers.sent == [("b", StatusRequest(1, 7, 2))]
        service.frame_arrived("b", Status(1, agent("b")))
        assert peers.sent[1:] == [("c", StatusRequest(1, 7, 2))]
        service.frame_arrived("c", Status(1, agent("c")))
        assert nodes(await answers) == ["a", "b", "c"]


async def test_another_agent_is_told_after_the_probe() -> None:
    async def probe(bandwidth: bool) -> tuple[ReachReport, ...]:
        return reach_of("b")

    peers = Peers("b")
    service = StatusService(lambda uid: agent("a"), peers, wait=1.0, probe=probe)
    service.frame_arrived("b", StatusRequest(9, 7, 1))
    async with asyncio.timeout(PATIENCE):
        await peers.sending.wait()
    assert peers.sent == [("b", Status(9, replace(agent("a"), reach=reach_of("b"))))]


async def test_a_probe_that_fails_costs_only_its_own_part() -> None:
    answers: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    async def probe(bandwidth: bool) -> tuple[ReachReport, ...]:
        raise RuntimeError("a defect")

    service = StatusService(lambda uid: agent("a"), Peers(), wait=1.0, probe=probe)
    service.ask(7, answers.set_result, others=True, probe=1)
    async with asyncio.timeout(PATIENCE):
        assert await answers == Answer((agent("a"),), ())
