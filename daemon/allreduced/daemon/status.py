"""Answers what runs here, and asks the other agents what runs there, for a bounded time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from allreduced.daemon.ports import ReachablePeer
from allreduced.daemon.reach import longest
from allreduced.protocol.peer import Frame, Status, StatusFrame, StatusRequest
from allreduced.protocol.status import AgentReport, ReachReport, UnansweredReport, fit, later

logger = logging.getLogger("allreduced.status")

LONGEST_WAIT = 2.0
"""Seconds that are waited for other agents at most, for somebody sits there and waits."""


LONGEST_PROBE = 60.0
"""Seconds that are waited at most where all agents are to dial each other too."""

PROBE = 1
MEASURE = 2
"""What ``probe`` may be besides 0: agents dial each other; they also measure their links, one agent after another."""


def probe_wait(wait: float, others: int, probe: int) -> float:
    """Return for how many seconds ``others`` agents are waited for that dial each other before they answer. Pure.

    ``wait``: for those that only answer. Agents that measure do it one after the other.
    """
    if probe < MEASURE:
        return min(wait + longest(others, bandwidth=False), LONGEST_PROBE)
    return min((others + 1) * (wait + longest(others, bandwidth=True)), LONGEST_PROBE)


def status_wait(failure_timeout: float) -> float:
    """Return for how many seconds the answers of other agents are waited for.

    Well below the failure timeout: an agent that does not answer must still be told of as one, and not as a lost one.
    """
    return min(failure_timeout / 4, LONGEST_WAIT)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found out. ``reports``: the own one first. ``unanswered``: agents that did not report, and why.

    What the reports say of calls is true of the moment of the answer, whenever each of them was made.
    """

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
Probe: TypeAlias = Callable[[bool], Awaitable[tuple[ReachReport, ...]]]
"""Dials all others and returns what came of it; True: measures the links as well."""


@dataclass(slots=True, eq=False)
class _Inquiry:
    own: AgentReport
    uid: int
    probe: int
    wait: float
    waiting: set[str]
    answered: Answered
    timer: asyncio.TimerHandle
    made: float
    """When the own report was made."""
    reports: list[tuple[float, AgentReport]] = field(default_factory=list)
    """When the reports of others came, and these."""
    unasked: list[str] = field(default_factory=list)
    """Agents that are asked when the one before has answered."""


class StatusService:
    """Where clients and other agents ask what runs.

    ``report``: makes the own report for a uid. ``wait``: seconds for the answers of others, see :func:`status_wait`.
    ``probe``: see Probe; None where nobody can be dialled.
    """

    def __init__(
        self,
        report: Callable[[int], AgentReport],
        peers: StatusPeers,
        *,
        wait: float,
        probe: Probe | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._peers = peers
        self._wait = wait
        self._probe = probe
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._inquiries: dict[int, _Inquiry] = {}
        self._number = 0

    def ask(self, uid: int, answered: Answered, *, others: bool, probe: int = 0) -> None:
        """Find out what the user ``uid`` may know, and call ``answered`` once: at once, or within the wait.

        ``others``: ask the other agents too. ``probe``: 0, PROBE or MEASURE; then up to ``LONGEST_PROBE`` is waited.
        After :meth:`close` it is not called any more.
        """
        own = self._report(uid)
        probe = probe if self._probe is not None else 0
        nodes = {peer.node for peer in self._peers.view()} if others else set()
        if not nodes and not probe:
            answered(Answer((own,), self._unanswered([own], set()) if others else ()))
            return
        self._number += 1
        number = self._number
        wait = probe_wait(self._wait, len(nodes), probe) if probe else self._wait
        timer = asyncio.get_running_loop().call_later(wait, self._finish, number)
        inquiry = _Inquiry(own, uid, probe, wait, nodes, answered, timer, self._clock())
        self._inquiries[number] = inquiry
        if probe:
            inquiry.waiting.add(own.node)
            self._spawn(self._probe_own(number))
        inquiry.unasked = sorted(nodes - {own.node})
        if probe < MEASURE:
            while inquiry.unasked:
                self._ask_next(number, inquiry)

    def frame_arrived(self, node: str, frame: StatusFrame) -> None:
        """Answer the agent of a node, or take its answer; one that nobody waits for is ignored."""
        if isinstance(frame, StatusRequest):
            try:
                report = self._report(frame.uid)
            except Exception:  # must not end the link, over which jobs run
                logger.exception("event=defect handling=%s peer=%s", frame, node)
                return
            if frame.probe and self._probe is not None:
                self._spawn(self._answer_probed(node, frame, report))
            else:
                self._peers.send_frame(node, Status(frame.request, report))
            return
        inquiry = self._inquiries.get(frame.request)
        if inquiry is None or node not in inquiry.waiting or frame.report.node != node:
            return
        inquiry.reports.append((self._clock(), frame.report))
        self._answered(frame.request, inquiry, node)

    def close(self) -> None:
        """Forget all questions."""
        for inquiry in self._inquiries.values():
            inquiry.timer.cancel()
        self._inquiries.clear()
        for task in self._tasks:
            task.cancel()

    def _ask_next(self, number: int, inquiry: _Inquiry) -> None:
        self._peers.send_frame(inquiry.unasked.pop(0), StatusRequest(number, inquiry.uid, inquiry.probe))

    def _answered(self, number: int, inquiry: _Inquiry, node: str) -> None:
        inquiry.waiting.discard(node)
        if not inquiry.waiting:
            self._finish(number)
        elif inquiry.unasked:
            self._ask_next(number, inquiry)

    async def _probe_own(self, number: int) -> None:
        inquiry = self._inquiries[number]
        reach = await self._reach(inquiry.probe)
        if number in self._inquiries:
            inquiry.own = replace(inquiry.own, reach=reach)
            self._answered(number, inquiry, inquiry.own.node)

    async def _answer_probed(self, node: str, frame: StatusRequest, report: AgentReport) -> None:
        report = fit(replace(report, reach=await self._reach(frame.probe)))
        self._peers.send_frame(node, Status(frame.request, report))

    async def _reach(self, probe: int) -> tuple[ReachReport, ...]:
        try:
            return await self._probe(probe >= MEASURE) if self._probe is not None else ()
        except Exception:
            logger.exception("event=defect handling=probe")
            return ()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _finish(self, number: int) -> None:
        inquiry = self._inquiries.pop(number)
        inquiry.timer.cancel()
        now = self._clock()
        told = [(inquiry.made, inquiry.own), *sorted(inquiry.reports, key=lambda told: told[1].node)]
        reports = [later(report, now - at) for at, report in told]
        waiting = inquiry.waiting - {inquiry.own.node}
        inquiry.answered(Answer(tuple(reports), self._unanswered(reports, waiting, inquiry.wait)))

    def _unanswered(
        self, reports: Sequence[AgentReport], waiting: set[str], wait: float = 0.0
    ) -> tuple[UnansweredReport, ...]:
        """Say of every agent that is known and did not report why."""
        silence = {peer.node: peer.silence for peer in self._peers.view()}
        known = {report.node for report in reports}
        why: dict[str, str] = {}
        for node in waiting:
            if node in silence:
                why[node] = f"did not answer within {wait:.3g} s; last heard of {silence[node]:.1f} s ago"
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
