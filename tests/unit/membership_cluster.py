"""Memberships of several agents, joined by queues that only tests move."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from allreduced.core.errors import AllReducedError, PeerLost
from allreduced.core.identity import GroupKey
from allreduced.daemon.engine.actions import Frozen as EngineFrozen
from allreduced.daemon.engine.events import Changed, Freeze, GroupStarted
from allreduced.daemon.membership.actions import Action, Admit, Reject, SendFrame, SetTimer, TellClients, TellEngine
from allreduced.daemon.membership.events import (
    ClientJoining,
    Event,
    FrameArrived,
    Frozen,
    LinkLost,
    PeerDown,
    PeerUp,
    TimePassed,
)
from allreduced.daemon.membership.membership import Membership
from allreduced.daemon.timing import derived
from allreduced.protocol.peer import MembershipFrame

T = 8.0
"""The failure timeout."""
KEY = GroupKey(1000, "job", "world")
TILE = 1 << 20


@dataclass
class Agent:
    """One membership, what it said, and what its clients and engine were told."""

    name: str
    incarnation: int
    membership: Membership
    admitted: dict[int, GroupStarted] = field(default_factory=dict)
    rejected: dict[int, AllReducedError] = field(default_factory=dict)
    ended: dict[int, AllReducedError] = field(default_factory=dict)
    engine: list[object] = field(default_factory=list)
    timer: float | None = None
    frozen: dict[tuple[int, int], EngineFrozen] = field(default_factory=dict)
    """What its engine says when it freezes (group, generation); nothing where not listed."""
    asleep: bool = False
    """Its engine does not answer Freeze."""

    def changes(self, group: int) -> list[Changed]:
        """Return the changes that its engine was told."""
        return [event for event in self.engine if isinstance(event, Changed) and event.group == group]


class Cluster:
    """Memberships joined by in-order queues; nothing moves until the test says so."""

    def __init__(self, names: str, seed: int = 0, *, connect: bool = True) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.agents: dict[str, Agent] = {}
        self.queues: dict[tuple[str, str], deque[MembershipFrame]] = {}
        self.clients = 0
        self.delay = 0.0
        """Seconds that each frame is under way; 0: it waits until the test moves it."""
        self._sent = 0
        self._under_way: list[tuple[float, int, tuple[str, str], MembershipFrame]] = []
        for name in names:
            self.start(name)
        if connect:
            for one in names:
                for other in names:
                    if one < other:
                        self.link(one, other)

    def start(self, name: str) -> Agent:
        incarnation = self.random.getrandbits(32)
        membership = Membership(name, incarnation, TILE, lambda: self.random.getrandbits(64), derived(T))
        self.agents[name] = Agent(name, incarnation, membership)
        return self.agents[name]

    def link(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            self.queues[here, there] = deque()
        self.tell(one, PeerUp(other, self.agents[other].incarnation))
        self.tell(other, PeerUp(one, self.agents[one].incarnation))

    def cut(self, one: str, other: str) -> None:
        """End the link of two agents; what was under way is lost."""
        for here, there in ((one, other), (other, one)):
            self.queues.pop((here, there), None)
            if here in self.agents:
                self.tell(here, LinkLost(there))

    def leave(self, name: str) -> None:
        """Stop an agent in order."""
        del self.agents[name]
        for other in list(self.agents):
            while self.queues.get((name, other)):
                self.deliver_one((name, other))
            self.queues.pop((name, other), None)
            self.queues.pop((other, name), None)
            self.tell(other, PeerDown(name, None, proven=True))

    def kill(self, name: str) -> None:
        """Kill an agent; every other one is refused when it dials it."""
        del self.agents[name]
        for other in list(self.agents):
            self.cut(other, name)
            self.tell(other, PeerDown(name, gone(name), proven=True))

    def silence(self, one: str, other: str) -> None:
        """Let ``one`` declare ``other`` dead because nothing was heard."""
        self.queues.pop((one, other), None)
        self.queues.pop((other, one), None)
        silent = PeerLost(f"agent {other!r} was silent", nodes=(other,))
        self.tell(one, PeerDown(other, silent, proven=False))

    def pass_time(self, until: float) -> None:
        """Let timers ring and frames move until then."""
        self.deliver_all()
        while True:
            due = [(agent.timer, name) for name, agent in self.agents.items() if agent.timer is not None]
            if self._under_way and (not due or self._under_way[0][0] <= min(due)[0]) and self._under_way[0][0] <= until:
                self.now, _, (sender, receiver), frame = heapq.heappop(self._under_way)
                self.tell(receiver, FrameArrived(sender, frame))
                continue
            if not due or min(due)[0] > until:
                break
            at, name = min(due)
            self.now = max(self.now, at)
            self.tell(name, TimePassed())
            self.deliver_all()
        self.now = until

    def tell(self, name: str, event: Event) -> list[Action]:
        agent = self.agents[name]
        actions = agent.membership.handle(event, self.now)
        answers: list[Event] = []
        for action in actions:
            match action:
                case SendFrame(node, frame):
                    if (name, node) in self.queues and self.delay:
                        self._sent += 1
                        heapq.heappush(self._under_way, (self.now + self.delay, self._sent, (name, node), frame))
                    elif (name, node) in self.queues:
                        self.queues[name, node].append(frame)
                case Admit(client, _, rank, started):
                    assert client not in agent.admitted
                    assert client not in agent.rejected
                    assert started in agent.engine
                    assert started.local[rank] == client
                    agent.admitted[client] = started
                case Reject(client, _, error):
                    assert client not in agent.admitted
                    assert client not in agent.rejected
                    agent.rejected[client] = error
                case TellEngine(told):
                    agent.engine.append(told)
                    if isinstance(told, Freeze) and not agent.asleep:
                        nothing = EngineFrozen(told.group, told.generation, (), (), 0, ())
                        answers.append(Frozen(agent.frozen.get((told.group, told.generation), nothing)))
                case TellClients(clients, _, error):
                    for client in clients:
                        agent.ended[client] = error
                case SetTimer(at):
                    agent.timer = at
        for answer in answers:
            actions += self.tell(name, answer)
        return actions

    def join(
        self,
        name: str,
        rank: int,
        size: int,
        *,
        key: GroupKey = KEY,
        pid: int = 7,
        deadline_at: float = 300.0,
        proof: bytes = b"",
    ) -> int:
        self.clients += 1
        self.tell(name, ClientJoining(self.clients, 1, key, size, rank, 0, pid, deadline_at, proof))
        return self.clients

    def deliver_one(self, pair: tuple[str, str]) -> None:
        frame = self.queues[pair].popleft()
        self.tell(pair[1], FrameArrived(pair[0], frame))

    def deliver_all(self) -> None:
        """Move frames, in random order over the links, until none is left."""
        for _ in range(100_000):
            ready = [pair for pair, queue in self.queues.items() if queue]
            if not ready:
                return
            self.deliver_one(self.random.choice(ready))
        pytest.fail("the agents do not come to rest")

    def started(self, name: str, client: int) -> GroupStarted:
        return self.agents[name].admitted[client]

    def error(self, name: str, client: int) -> AllReducedError:
        return self.agents[name].rejected[client]


def gone(name: str) -> PeerLost:
    return PeerLost(f"agent {name!r} is gone: its address refuses connections", nodes=(name,))


def formed(names: str, seed: int = 0) -> tuple[Cluster, dict[str, int]]:
    """Return agents with one rank each in one group, and their clients."""
    cluster = Cluster(names, seed)
    clients = {name: cluster.join(name, rank, len(names), pid=100 + rank) for rank, name in enumerate(names)}
    cluster.deliver_all()
    assert all(client in cluster.agents[name].admitted for name, client in clients.items())
    return cluster, clients


def group_of(cluster: Cluster, clients: dict[str, int]) -> int:
    return cluster.started(*next(iter(clients.items()))).group


def states(cluster: Cluster) -> dict[str, list[tuple[str, int]]]:
    return {
        name: [(group.state, group.generation) for group in agent.membership.snapshot().groups]
        for name, agent in cluster.agents.items()
    }


def told(cluster: Cluster, clients: dict[str, int]) -> dict[str, AllReducedError]:
    return {name: agent.ended[clients[name]] for name, agent in cluster.agents.items() if clients[name] in agent.ended}
