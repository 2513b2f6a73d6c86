"""One run: machines, agents, clients and faults on virtual time, from the start until everything is healed and gone."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial

from tests.simulation.agenda import Agenda
from tests.simulation.whole.agent import SimulatedAgent
from tests.simulation.whole.client import SimulatedClient
from tests.simulation.whole.history import History, Seat
from tests.simulation.whole.invariants import check_delivery, check_run
from tests.simulation.whole.process import Process
from tests.simulation.whole.scenario import Fault, OperationPlan, Scenario
from tests.simulation.whole.wire import Wire

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction
from allreduced.daemon.timing import derived
from allreduced.protocol import peer

AFTER = "after"
"""The group that everybody forms once all faults are over."""

_MOST_STEPS = 3_000_000


class World:
    """A run of a scenario. ``history`` has what happened, ``history.violations`` what must not have."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.timeout = scenario.timeout
        self.history = History()
        self.agenda = Agenda()
        names = sorted(scenario.processes)
        self.wire = Wire(self.agenda, scenario.seed, scenario.timeout, names)
        self.agents: dict[str, SimulatedAgent] = {}
        self.clients: dict[tuple[str, int], SimulatedClient] = {}
        self.faults: Counter[str] = Counter()
        self.healed = False
        self.pauses: list[tuple[str, float, float]] = []
        """Agents that were stopped, from when to when."""
        self.latest = -1e9
        """How much later than its deadline an operation ended."""
        self._timing = derived(scenario.timeout)
        self._rng = random.Random(f"{scenario.seed} world")
        self._numbers = 0
        self._incarnations: Counter[str] = Counter()
        self._offsets = {name: self._rng.random() * 1e4 for name in names}
        self._sent: Counter[str] = Counter()
        self._triggers: dict[tuple[str, int], list[Fault]] = {}
        self._after = OperationPlan(AFTER, "", "all_reduce", DType.INT32, Reduction.SUM, 33, -1, "", 0.0, 20.0)
        self._unheal: list[Callable[[], None]] = []

    # What agents and clients need

    def agent_of(self, node: str) -> SimulatedAgent | None:
        """Return the agent of a node, if one runs."""
        return self.agents.get(node)

    def next_number(self) -> int:
        """Return a number that nothing else has."""
        self._numbers += 1
        return self._numbers

    def operations_of(self, group: str) -> list[tuple[int, OperationPlan]]:
        """Return what is planned for a group, with its place in the plan."""
        if group == AFTER:
            return [(-1, self._after)]
        return [(index, one) for index, one in enumerate(self.scenario.operations) if one.group == group]

    def operation(self, index: int) -> OperationPlan:
        """Return an operation by its place in the plan."""
        return self._after if index < 0 else self.scenario.operations[index]

    def sends(self, source: str, target: str, frame: peer.Frame) -> None:
        """Count a frame that goes out, and let faults happen that wait for it."""
        name = type(frame).__name__
        self._sent[name] += 1
        for fault in self._triggers.pop((name, self._sent[name]), ()):
            self._plan(fault, self.agenda.now + fault.delay, source, target)

    def delivers(self, seat: Seat, agent: SimulatedAgent) -> None:
        """Check a delivery at the moment when it happens."""
        check_delivery(self, seat, agent)

    # The run

    def run(self) -> History:
        """Run to the end; what goes wrong on the way is a violation, too."""
        try:
            self._run()
        except Exception as error:  # whatever the pure parts raise is a finding
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
            self.history.violated("defect", text)
            self.history.note(self.agenda.now, "defect", "".join(traceback.format_exception(error)[-6:]))
        return self.history

    def _run(self) -> None:
        scenario, now = self.scenario, self.agenda.now
        for fault in scenario.faults:
            if fault.frame:
                self._triggers.setdefault((fault.frame, fault.count), []).append(fault)
            else:
                self._plan(fault, fault.at, "", "")
        for name in scenario.processes:
            self.agenda.at(now + self._rng.random() * 1e-3, partial(self._start_agent, name))
        for name, count in scenario.processes.items():
            for slot in range(count):
                self.agenda.at(2e-3 + self._rng.random() * 3e-3, partial(self._start_client, name, slot))
        self.agenda.run_until(scenario.heal_at)
        self._heal()
        longest = max((operation.deadline for operation in scenario.operations), default=0.0)
        if self._until(self.agenda.now + longest + 6 * self.timeout, self._all_ended):
            self.history.violated("1 one end", "a client waits for ever")
        if self._until(self.agenda.now + 3 * self.timeout, self._all_quiet):
            busy = [self._unrest(agent) for agent in self.agents.values() if not agent.idle]
            self.history.violated("5 nothing left", "; ".join(busy), self._unquiet())
        self._form_after()
        if self._until(self.agenda.now + 25 * self.timeout, self._all_after):
            self.history.violated("6 works after", "a client waits for ever")
        for client in self.clients.values():
            client.leave()
        if self._until(self.agenda.now + 2 * self.timeout, self._all_gone):
            left = [self._unrest(agent) for agent in self.agents.values() if not self._gone(agent)]
            self.history.violated("5 nothing left", f"after all left: {'; '.join(left)}", self._unquiet())
        check_run(self)

    def _until(self, time: float, done: Callable[[], bool]) -> bool:
        """Run until ``done`` or ``time``; returns whether that came first."""
        agenda, step = self.agenda, self.timeout / 32
        while True:
            if done():
                return False
            if agenda.now >= time:
                return True
            agenda.run_until(min(time, agenda.now + step))
            step = min(1.3 * step, self.timeout / 4)
            if agenda.steps > _MOST_STEPS:
                raise AssertionError("the run does not come to an end")

    def _all_ended(self) -> bool:
        return all(client.process.alive and not client.waiting for client in self.clients.values())

    def _all_after(self) -> bool:
        return all(client.finished for client in self.clients.values())

    def _all_quiet(self) -> bool:
        return all(agent.idle for agent in self.agents.values())

    def _all_gone(self) -> bool:
        return all(self._gone(agent) for agent in self.agents.values())

    def _gone(self, agent: SimulatedAgent) -> bool:
        engine = agent.engine.snapshot()
        memberships = agent.membership.snapshot()
        return (
            not engine["groups"]
            and not engine["memory"]["arenas"]
            and not memberships.groups
            and not memberships.gatherings
            and not any(agent.workshop.busy)
            and not agent.workshop.arenas
        )

    def _unquiet(self) -> int:
        """Return a group that is not at rest."""
        for agent in self.agents.values():
            engine, memberships = agent.engine.snapshot(), agent.membership.snapshot()
            for number, group in engine["groups"].items():
                if group["ending"] or group["operations"] or all(view.group != number for view in memberships.groups):
                    return number
        return 0

    def _unrest(self, agent: SimulatedAgent) -> str:
        engine, memberships = agent.engine.snapshot(), agent.membership.snapshot()
        groups = {
            number: (group["error"], group["operations"], group["ending"]) for number, group in engine["groups"].items()
        }
        return (
            f"{agent.node}: calls {agent.calls}, receives, sends, jobs {agent.workshop.busy}, memory"
            f" {engine['memory']}, leases {engine['leases']}, groups {groups}, memberships {memberships.groups}"
            f" {memberships.gatherings}"
        )

    # Who is there

    def _start_agent(self, name: str) -> None:
        host = self.wire.hosts[name]
        if host.agent is not None:
            return
        host.powered = True
        self._incarnations[name] += 1
        incarnation = self._incarnations[name]
        process = Process(self.agenda, self._offsets[name])
        seed = f"{self.scenario.seed} {name} {incarnation}"
        agent = SimulatedAgent(name, incarnation, process, self, self.scenario.sizes, self._timing, seed)
        host.agent = agent.plane
        self.agents[name] = agent
        self.history.note(self.agenda.now, name, f"agent starts, incarnation {incarnation}")
        agent.plane.echoes = self.scenario.echoes
        agent.plane.start(
            other for other in self.wire.hosts if other != name and (name, other) not in self.scenario.blind
        )

    def _stop_agent(self, name: str, *, silent: bool) -> None:
        agent = self.agents.pop(name, None)
        if agent is None:
            return
        agent.gone()
        agent.process.kill()
        host = self.wire.hosts[name]
        host.powered = not silent
        self.wire.fell(host, silent=silent)
        for client in list(agent.attached.values()):
            if client.process.alive:
                client.agent_lost()

    def _start_client(self, name: str, slot: int) -> None:
        known = self.clients.get((name, slot))
        if known is not None and known.process.alive:
            return
        process = Process(self.agenda)
        self._numbers += 1
        rng = random.Random(f"{self.scenario.seed} {name} {slot} {self._numbers}")
        client = SimulatedClient(self, name, slot, process, rng, self.scenario.reforms)
        self.clients[name, slot] = client
        deadline = (1.5 if known is not None else 3.0) * self.timeout
        groups = [group for group in self.scenario.groups if (name, slot) in group.ranks]
        client.start([(group.name, group.ranks.index((name, slot)), len(group.ranks)) for group in groups], deadline)

    # Faults

    def _plan(self, fault: Fault, at: float, sender: str, target: str) -> None:
        roles = {"@sender": sender, "@target": target}
        node, other = roles.get(fault.node, fault.node), roles.get(fault.other, fault.other)
        side = tuple(roles.get(one, one) for one in fault.side)
        if fault.frame and at == self.agenda.now:
            self._happens(fault, node, other, side)
        else:
            self.agenda.at(at, partial(self._happens, fault, node, other, side))

    def _happens(self, fault: Fault, node: str, other: str, side: tuple[str, ...]) -> None:
        if self.healed:
            return
        begin: Callable[[Fault, str, str, tuple[str, ...]], Callable[[], None] | None] = getattr(self, f"_{fault.kind}")
        over = begin(fault, node, other, side)
        if over is None:
            return
        self.faults[fault.kind] += 1
        self.history.note(self.agenda.now, "fault", f"{fault.kind} {node} {other} {'+'.join(side)}")
        done = False

        def once() -> None:
            nonlocal done
            if not done:
                done = True
                self.history.note(self.agenda.now, "fault", f"over: {fault.kind} {node} {other} {'+'.join(side)}")
                over()

        self._unheal.append(once)
        if fault.seconds:
            self.agenda.after(fault.seconds, once)

    def _heal(self) -> None:
        self.healed = True
        self.history.note(self.agenda.now, "fault", "everything is healed")
        for over in self._unheal:
            over()
        for name, count in self.scenario.processes.items():
            self._start_agent(name)
            for slot in range(count):
                self.agenda.after(self._rng.random() * 1e-2, partial(self._start_client, name, slot))

    def _crash(self, fault: Fault, node: str, other: str, side: tuple[str, ...]) -> Callable[[], None] | None:
        return self._ends(node, silent=False)

    def _power(self, fault: Fault, node: str, other: str, side: tuple[str, ...]) -> Callable[[], None] | None:
        over = self._ends(node, silent=True)
        if over is not None:
            for (name, _), client in self.clients.items():
                if name == node:
                    client.crashed()
        return over

    def _ends(self, node: str, *, silent: bool) -> Callable[[], None] | None:
        if node not in self.agents:
            return None
        self._stop_agent(node, silent=silent)
        return partial(self._start_agent, node)

    def _drain(self, fault: Fault, node: str, other: str, side: tuple[str, ...]) -> Callable[[], None] | None:
        agent = self.agents.get(node)
        if agent is None or agent.draining or agent.process.paused:
            return None
        agent.draining = True

        def look(tries: int) -> None:
            if self.agents.get(node) is not agent:
                return
            if tries and (not agent.idle or agent.process.paused):
                self.agenda.after(self.timeout / 16, partial(look, tries - 1))
                return
            agent.close()
            self.agenda.after(self.timeout / 32, gone)

        def gone() -> None:
            if self.agents.get(node) is agent:
                self._stop_agent(node, silent=False)

        def over() -> None:
            gone()
            self._start_agent(node)

        look(16)
        return over

    def _pause(self, fault: Fault, node: str, other: str, side: tuple[str, ...]) -> Callable[[], None] | None:
        agent = self.agents.get(node)
        if agent is None:
            return None
        agent.process.pause()
        since = self.agenda.now

        def over() -> None:
            self.pauses.append((node, since, self.agenda.now))
            agent.process.resume(self._rng)

        return over

    def _cut(self, fault: Fault, node: str, other: str, side: tuple[str, ...]) -> Callable[[], None] | None:
        return _nothing if self.wire.cut(node, other) else None

    def _part(self, fault: Fault, node: str, other: str, side: tuple[str, ...]) -> Callable[[], None] | None:
        ways = self._ways(side, other)
        return self._blocks(ways + [(another, one) for one, another in ways])

    def _oneway(self, fault: Fault, node: str, other: str, side: tuple[str, ...]) -> Callable[[], None] | None:
        return self._blocks(self._ways(side, other))

    def _ways(self, side: tuple[str, ...], other: str) -> list[tuple[str, str]]:
        others = [other] if other else [name for name in self.wire.hosts if name not in side]
        return [(one, another) for one in side for another in others if one != another]

    def _blocks(self, ways: list[tuple[str, str]]) -> Callable[[], None]:
        self.wire.block(ways)
        return partial(self.wire.unblock, ways)

    def _slow(self, fault: Fault, node: str, other: str, side: tuple[str, ...]) -> Callable[[], None] | None:
        self.wire.slow[node] += 1
        return partial(self.wire.slow.subtract, [node])

    def _kill(self, fault: Fault, node: str, other: str, side: tuple[str, ...]) -> Callable[[], None] | None:
        client = self.clients.get((node, fault.slot))
        if client is None or not client.process.alive:
            return None
        client.crashed()
        return partial(self._start_client, node, fault.slot)

    def _hang(self, fault: Fault, node: str, other: str, side: tuple[str, ...]) -> Callable[[], None] | None:
        client = self.clients.get((node, fault.slot))
        if client is None or not client.process.alive:
            return None
        client.process.pause()
        return partial(client.process.resume, self._rng)

    def _leave(self, fault: Fault, node: str, other: str, side: tuple[str, ...]) -> Callable[[], None] | None:
        client = self.clients.get((node, fault.slot))
        if client is None or not client.process.alive or client.process.paused:
            return None
        client.leave()
        return _nothing

    def _memory(self, fault: Fault, node: str, other: str, side: tuple[str, ...]) -> Callable[[], None] | None:
        agent = self.agents.get(node)
        if agent is None:
            return None
        workshop = agent.workshop
        workshop.no_arenas += 1

        def over() -> None:
            workshop.no_arenas -= 1

        return over

    # After all of it

    def _form_after(self) -> None:
        places = sorted(self.clients)
        for client in self.clients.values():
            client.leave()
        for rank, place in enumerate(places):
            client = self.clients[place]
            client.last_group = AFTER
            join = partial(client.join, AFTER, rank, len(places), 10 * self.timeout)
            self.agenda.after(self._rng.random() * 1e-2, join)


def _nothing() -> None:
    pass
