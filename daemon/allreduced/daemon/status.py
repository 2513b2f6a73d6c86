"""Answers what runs here, and asks the other agents what runs there, for a bounded time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from allreduced.daemon.ports import ReachablePeer
from allreduced.protocol.peer import Frame, Status, StatusFrame, StatusRequest
from allreduced.protocol.status import AgentReport, UnansweredReport

logger = logging.getLogger("allreduced.status")

LONGEST_WAIT = 2.0
"""Seconds that are waited for other agents at most, for somebody sits there and waits."""


def status_wait(failure_timeout: float) -> float:
    """Return for how many seconds the answers of other agents are waited for.

    Well below the failure timeout: an agent that does not answer must still be told of as one, and not as a lost one.
    """
    return min(failure_timeout / 4, LONGEST_WAIT)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found out. ``reports``: the own one first. ``unanswered``: agents that did not report, and why."""

    reports: tuple[AgentReport, ...]
    unanswered: tuple[UnansweredReport, ...]


class StatusPeers(Protocol):
    """The peer plane, as far as it is needed here."""

    def view(self) -> tuple[ReachablePeer, ...]:
        """Return the peers that can be reached now."""

    def not_reached(self) -> tuple[tuple[str, str], ...]:
        """Return (node, why) of agents that are known and have no link; the node is empty where it is not known."""

    def send_frame(self, node: str, frame: Frame) -> None:
        """Send a control frame; dropped where there is no link."""


Answered: TypeAlias = Callable[[Answer], None]


@dataclass(slots=True, eq=False)
class _Inquiry:
    own: AgentReport
    waiting: set[str]
    answered: Answered
    timer: asyncio.TimerHandle
    reports: list[AgentReport]


class StatusService:
    """Where clients and other agents ask what runs.

    ``report``: makes the own report for a uid. ``wait``: seconds for the answers of others, see :func:`status_wait`.
    """

    def __init__(self, report: Callable[[int], AgentReport], peers: StatusPeers, *, wait: float) -> None:
        self._report = report
        self._peers = peers
        self._wait = wait
        self._inquiries: dict[int, _Inquiry] = {}
        self._number = 0

    def ask(self, uid: int, answered: Answered, *, others: bool) -> None:
        """Find out what the user ``uid`` may know, and call ``answered`` once: at once, or within the wait.

        ``others``: ask the other agents too. After :meth:`close` it is not called any more.
        """
        own = self._report(uid)
        nodes = {peer.node for peer in self._peers.view()} if others else set()
        if not nodes:
            answered(Answer((own,), self._unanswered([own], set()) if others else ()))
            return
        self._number += 1
        number = self._number
        timer = asyncio.get_running_loop().call_later(self._wait, self._finish, number)
        self._inquiries[number] = _Inquiry(own, nodes, answered, timer, [])
        for node in sorted(nodes):
            self._peers.send_frame(node, StatusRequest(number, uid))

    def frame_arrived(self, node: str, frame: StatusFrame) -> None:
        """Answer the agent of a node, or take its answer; one that nobody waits for is ignored."""
        if isinstance(frame, StatusRequest):
            try:
                report = self._report(frame.uid)
            except Exception:  # must not end the link, over which jobs run
                logger.exception("event=defect handling=%s peer=%s", frame, node)
                return
            self._peers.send_frame(node, Status(frame.request, report))
            return
        inquiry = self._inquiries.get(frame.request)
        if inquiry is None or node not in inquiry.waiting or frame.report.node != node:
            return
        inquiry.waiting.remove(node)
        inquiry.reports.append(frame.report)
        if not inquiry.waiting:
            self._finish(frame.request)

    def close(self) -> None:
        """Forget all questions."""
        for inquiry in self._inquiries.values():
            inquiry.timer.cancel()
        self._inquiries.clear()

    def _finish(self, number: int) -> None:
        inquiry = self._inquiries.pop(number)
        inquiry.timer.cancel()
        reports = [inquiry.own, *sorted(inquiry.reports, key=lambda report: report.node)]
        inquiry.answered(Answer(tuple(reports), self._unanswered(reports, inquiry.waiting)))

    def _unanswered(self, reports: Sequence[AgentReport], waiting: set[str]) -> tuple[UnansweredReport, ...]:
        """Say of every agent that is known and did not report why."""
        silence = {peer.node: peer.silence for peer in self._peers.view()}
        known = {report.node for report in reports}
        why: dict[str, str] = {}
        for node in waiting:
            if node in silence:
                why[node] = f"did not answer within {self._wait:.3g} s; last heard of {silence[node]:.1f} s ago"
            else:
                why[node] = "its link was lost while it was asked"
        unnamed = []
        for node, reason in self._peers.not_reached():
            if not node:
                unnamed.append(UnansweredReport("", reason))
            elif node not in known:
                why.setdefault(node, reason)
        for report in reports:
            for group in report.groups:
                for member in group.members:
                    if member.node not in known:
                        why.setdefault(member.node, "there is no link to it")
        return (*(UnansweredReport(node, reason) for node, reason in sorted(why.items())), *unnamed)
