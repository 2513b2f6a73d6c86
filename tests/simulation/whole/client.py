"""A simulated training process: joins its groups, calls what is planned, reads results, and goes on after failures."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from tests.simulation.whole.agent import SimulatedAgent
from tests.simulation.whole.history import History, Request
from tests.simulation.whole.inputs import data_of
from tests.simulation.whole.process import Callback, Lane, Process
from tests.simulation.whole.scenario import OperationPlan

from allreduced.core.dtypes import DType
from allreduced.core.errors import AgentUnavailable, AllReducedError
from allreduced.core.identity import GroupKey
from allreduced.daemon.engine import events as engine_events
from allreduced.daemon.engine.events import GroupStarted, LeasesReturned, Submitted
from allreduced.daemon.engine.region import Region
from allreduced.daemon.membership import events as membership_events
from allreduced.protocol.peer import Fingerprint


class Place(Protocol):
    """The machine and the run, as a client sees them."""

    history: History
    timeout: float

    def agent_of(self, node: str) -> SimulatedAgent | None:
        """Return the agent of a node, if one runs."""

    def next_number(self) -> int:
        """Return a number that nothing else has."""

    def operations_of(self, group: str) -> list[tuple[int, OperationPlan]]:
        """Return what is planned for a group."""


@dataclass(slots=True, eq=False)
class _Joined:
    """One formed group that this process is in."""

    name: str
    rank: int
    started: GroupStarted
    uses: dict[str, int] = field(default_factory=dict)
    planned: int = 0
    """Calls that are still to come."""
    open: int = 0
    """Calls that have not ended."""
    error: AllReducedError | None = None
    left: bool = False


class SimulatedClient:
    """One start of a client process. ``number`` is its attachment to the agent; it changes when the agent does."""

    def __init__(self, place: Place, node: str, slot: int, process: Process, rng: random.Random, reforms: int) -> None:
        self.node = node
        self.slot = slot
        self.process = process
        self.number = 0
        self.agent: SimulatedAgent | None = None
        self.groups: dict[int, _Joined] = {}
        self.joining: dict[int, tuple[str, int, int]] = {}
        """By request: the group, the rank and the size that were asked for."""
        self.refusals: list[tuple[str, AllReducedError]] = []
        self.last_group = ""
        """Once set, no other group is joined."""
        self._place = place
        self._rng = rng
        self._reforms = reforms
        self._out = Lane()
        self._back = Lane()
        self._requests: dict[int, tuple[Request, _Joined, Region | None]] = {}

    @property
    def name(self) -> str:
        """How the log calls it."""
        return f"{self.node}.{self.slot}"

    @property
    def waiting(self) -> bool:
        """True while it waits for a group, or for an operation that was called or is still to be."""
        return bool(self.joining) or any(joined.open or joined.planned for joined in self.groups.values())

    @property
    def finished(self) -> bool:
        """True once all is over with the last group."""
        if any(name == self.last_group for name, _ in self.refusals):
            return True
        last = [joined for joined in self.groups.values() if joined.name == self.last_group]
        return bool(last) and not self.waiting

    # To the agent

    def attach(self) -> bool:
        """Attach to the agent of this node; False where none runs."""
        self.agent = self._place.agent_of(self.node)
        if self.agent is None:
            return False
        self.number = self._place.next_number()
        self.agent.attached[self.number] = self
        return True

    def start(self, groups: list[tuple[str, int, int]], deadline: float) -> None:
        """Attach, as soon as there is an agent, and join these groups: name, rank, size."""
        self._attach_again(groups, 40, deadline)

    def join(self, name: str, rank: int, size: int, deadline: float) -> None:
        """Claim a rank of a group."""
        if (self.last_group and name != self.last_group) or (self.agent is None and not self.attach()):
            return
        request = self._place.next_number()
        self.joining[request] = (name, rank, size)
        agent, number, slot, pid = self.agent, self.number, self.slot, self.number
        if agent is None:
            return
        key = GroupKey(1000, "job", name)

        def send() -> None:
            until = agent.process.now() + deadline
            agent.membership_event(membership_events.ClientJoining(number, request, key, size, rank, slot, pid, until))

        self._send(send)

    def leave(self) -> None:
        """Leave all groups."""
        for group, joined in list(self.groups.items()):
            if not joined.left:
                joined.left = True
                self._lost(joined)
                joined.planned = 0
                self._note("leaves", joined.name)
                agent = self.agent
                if agent is not None:
                    leaving = membership_events.ClientLeaving(self.number, group)
                    self._send(partial(agent.membership_event, leaving))

    def _send(self, callback: Callback) -> None:
        agent, number = self.agent, self.number
        if agent is None:
            return
        agenda = self.process.agenda
        at = self._out.arrival(agenda.now + 2e-5 + self._rng.random() * 2e-4)
        agenda.at(at, partial(agent.process.come, ("client", number), callback))

    def crashed(self) -> None:
        """End this process: its agent sees the end of the connection."""
        self.process.kill()
        for joined in self.groups.values():
            self._lost(joined)
        agent, number = self.agent, self.number
        if agent is None:
            return

        def gone() -> None:
            agent.attached.pop(number, None)
            agent.membership_event(membership_events.ClientGone(number, "calling something"))
            agent.engine_event(engine_events.ClientGone(number))

        self._send(gone)

    def _lost(self, joined: _Joined) -> None:
        self._place.history.lose(joined.started.group, [joined.rank], self.process.agenda.now)

    def agent_lost(self) -> None:
        """Take note that the agent's process ended: everything open ends with it."""
        self._note("lost its agent")
        now = self.process.agenda.now
        lost = AgentUnavailable("this node's agent went away")
        for request, joined, _ in self._requests.values():
            if not request.answers:  # else it is on its way
                request.answers.append((now, lost))
            joined.open -= 1
        again = [(joined.name, joined.rank, joined.started.size) for joined in self.groups.values() if not joined.left]
        again += self.joining.values()
        self._requests.clear()
        self.groups.clear()
        self.joining.clear()
        self.agent = None
        self.number = 0
        self._out, self._back = Lane(), Lane()
        if self._reforms > 0:
            self._reforms -= 1
            timeout = self._place.timeout
            self.process.after(timeout / 8, "agent", partial(self._attach_again, again, 40, 1.5 * timeout))

    def _attach_again(self, groups: list[tuple[str, int, int]], tries: int, deadline: float) -> None:
        if self.agent is None and not self.attach():
            if tries:
                again = partial(self._attach_again, groups, tries - 1, deadline)
                self.process.after(self._place.timeout / 8, "agent", again)
            return
        for name, rank, size in groups:
            self.join(name, rank, size, deadline)

    # Calls

    def _plan_calls(self, joined: _Joined) -> None:
        """Plan the calls of a group that formed; calls of one name keep their order."""
        last: dict[str, float] = {}
        calls = self._place.operations_of(joined.name)
        for index, operation in sorted(calls, key=lambda one: (one[1].at, one[0])):
            if joined.rank in operation.absent:
                continue
            at = operation.at + self._rng.random() ** 2 * self._rng.choice((2e-4, 2e-3))
            at = last[operation.name] = max(at, last.get(operation.name, 0.0))
            joined.planned += 1
            self.process.after(at, joined, partial(self._call, joined, index, operation))

    def _call(self, joined: _Joined, index: int, operation: OperationPlan) -> None:
        agent, number = self.agent, self.number
        if agent is None or joined.left or self.groups.get(joined.started.group) is not joined:
            return
        joined.planned -= 1
        use = joined.uses[operation.name] = joined.uses.get(operation.name, -1) + 1
        count = operation.count
        odd = joined.rank == operation.odd
        shape = f"(1, {count})" if odd else f"({count},)"
        described = Fingerprint(
            operation.kind, operation.dtype, operation.op, shape, count, operation.root, operation.algorithm
        )
        source: Region | None = None
        group = joined.started.group
        if count and operation.root in (-1, joined.rank):
            raw = data_of(group, index, joined.rank, DType(operation.dtype), count).view(np.uint8)
            buffer = self._place.next_number()
            agent.workshop.buffers[buffer] = raw
            source = Region(buffer, 0, len(raw))
        number_of_request = self._place.next_number()
        agenda = self.process.agenda
        # The clock of the deadline starts when the agent takes the call.
        request = Request(group, joined.rank, index, operation.name, use, None, self.process, agenda.now, agenda.now)
        self._place.history.requests.append(request)
        self._requests[number_of_request] = (request, joined, source)
        joined.open += 1

        def send() -> None:
            request.submitted = agenda.now
            request.deadline = agenda.now + operation.deadline
            request.taken = True
            until = agent.process.now() + operation.deadline
            agent.engine_event(
                Submitted(
                    number,
                    number_of_request,
                    group,
                    joined.rank,
                    operation.name,
                    described,
                    source,
                    until,
                    operation.priority,
                )
            )
            request.seat = self._place.history.seats.get((group, self.node, agent.incarnation))

        self._send(send)

    # From the agent. These run in the agent's process.

    def reply(self, agent: SimulatedAgent, callback: Callable[[], None]) -> None:
        """Let something happen in this process, after what the agent sent before."""
        agenda = self.process.agenda
        at = self._back.arrival(agenda.now + 2e-5 + self._rng.random() * 1e-4)

        def arrive() -> None:
            if self.agent is agent:
                callback()

        agenda.at(at, partial(self.process.come, "agent", arrive))

    def admitted(self, request: int, started: GroupStarted, rank: int) -> None:
        """Take a rank."""
        name, _, _ = self.joining.pop(request)
        joined = _Joined(name, rank, started)
        self.groups[started.group] = joined
        self._note("joined", f"{name} as rank {rank} ({started.group})")
        self._plan_calls(joined)

    def rejected(self, request: int, error: AllReducedError) -> None:
        """Take a refusal; try again later, a few times."""
        name, rank, size = self.joining.pop(request)
        self._note("refused", f"{name}: {error}")
        self.refusals.append((name, error))
        if self._reforms > 0:
            self._reforms -= 1
            again = partial(self.join, name, rank, size, 1.5 * self._place.timeout)
            self.process.after(self._place.timeout / 8, "agent", again)

    def ended(self, agent: SimulatedAgent, number: int, answer: AllReducedError | bytes | None) -> None:
        """Take the end of a call, in the agent's process."""
        known = self._requests.get(number)
        if known is not None:
            known[0].answers.append((self.process.agenda.now, answer))
        self.reply(agent, partial(self._over, agent, number))

    def leased(self, agent: SimulatedAgent, number: int, region: Region, lease: int) -> None:
        """Take a result in an arena; read it for a while under its lease."""
        first = agent.workshop.view(region).tobytes()
        known = self._requests.get(number)
        if known is not None:
            known[0].answers.append((self.process.agenda.now, first))

        def give_back() -> None:
            if self.agent is not agent:
                return
            if agent.workshop.view(region).tobytes() != first:
                raise AssertionError("a result changed under its lease")
            returned = LeasesReturned(self.number, (lease,))
            self._send(partial(agent.engine_event, returned))

        def read() -> None:
            self._over(agent, number)
            wait = self._rng.random() * (self._place.timeout / 2 if self._rng.random() < 0.05 else 1e-3)
            self.process.after(wait, "lease", give_back)

        self.reply(agent, read)

    def _over(self, agent: SimulatedAgent, number: int) -> None:
        _, joined, source = self._requests.pop(number)
        if source is not None:
            agent.workshop.check_free(source, "the client writes its input")
            agent.workshop.view(source)[:] = 0xEE
            del agent.workshop.buffers[source.buffer]
        joined.open -= 1
        self._maybe_again(joined)

    def group_ended(self, group: int, error: AllReducedError) -> None:
        """Take note that a group is over."""
        joined = self.groups.get(group)
        if joined is None:
            return
        self._note("group ended", error)
        joined.error = joined.error or error
        self._maybe_again(joined)

    def _maybe_again(self, joined: _Joined) -> None:
        """Leave a group that is over, once all calls ended, and form it anew."""
        if joined.error is None or joined.open or joined.planned or joined.left or self._reforms <= 0:
            return
        self._reforms -= 1
        joined.left = True
        agent = self.agent
        if agent is not None:
            leaving = membership_events.ClientLeaving(self.number, joined.started.group)
            self._send(partial(agent.membership_event, leaving))
            self._note("leaves, to form anew", joined.name)
            self.join(joined.name, joined.rank, joined.started.size, 1.5 * self._place.timeout)

    def _note(self, what: str, about: object = "") -> None:
        self._place.history.note(self.process.agenda.now, self.name, what, about)
