"""The network between simulated machines: connections, what is on its way, and what stands in its way.

A connection behaves as TCP does: control frames come in order or not at all; what a partition holds back comes when it
heals, also when its sender is long dead; a process that is killed has its connections reset by its machine, a machine
without power says nothing. Data pieces come in any order.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Protocol

from tests.simulation.agenda import Agenda
from tests.simulation.whole.process import Callback, Lane, Process

from allreduced.protocol.peer import Frame


class Owner(Protocol):
    """The peer plane of one agent, as its machine sees it."""

    process: Process
    node: str
    incarnation: int
    closing: bool

    def established(self, end: End) -> None:
        """Take a connection that is authenticated."""

    def frame_came(self, end: End, frame: Frame) -> None:
        """Take a control frame."""

    def data_came(self, end: End, token: bytes, offset: int, data: bytes, tag: int) -> None:
        """Take a piece of data."""

    def end_closed(self, end: End) -> None:
        """Take note that the connection is over: no call for it comes any more."""


class Host:
    """A machine. ``agent``: the agent that runs on it, if one does. ``heard``: when bytes last came from each machine.

    ``heard`` is what really came in, whether or not a process looked at it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.powered = True
        self.agent: Owner | None = None
        self.ends: set[End] = set()
        self.heard: dict[str, float] = {}


class End:
    """One end of a connection; ``peer`` is the other one."""

    __slots__ = ("closed", "deaf", "host", "lane", "number", "owner", "peer", "serials", "wire")

    def __init__(self, wire: Wire, number: int, host: Host, owner: Owner) -> None:
        self.wire = wire
        self.number = number
        self.host = host
        self.owner = owner
        self.peer: End
        self.lane = Lane()
        self.closed = False
        """Nothing is taken from the network any more."""
        self.deaf = False
        """The owner was told that it is over, or does not want to hear of it."""
        self.serials = 0
        host.ends.add(self)

    @property
    def node(self) -> str:
        """The machine at the other end."""
        return self.peer.host.name

    @property
    def incarnation(self) -> int:
        """The start of the agent at the other end."""
        return self.peer.owner.incarnation

    def send(self, frame: Frame) -> None:
        """Send a control frame."""
        if not self.closed:
            self.wire.carry(self.host.name, self.node, partial(self.peer._frame, frame), self.lane)

    def send_data(self, token: bytes, offset: int, data: bytes, tag: int) -> None:
        """Send a piece of data."""
        if not self.closed:
            self.wire.carry(self.host.name, self.node, partial(self.peer._data, token, offset, data, tag))

    def abort(self) -> None:
        """Close this end: the owner is told a bit later, and the other side when it hears of it."""
        if not self.closed:
            self.shut()
            self.owner.process.after(self.wire.rng.random() * 3e-4, self, self._over)

    def shut(self, *, silent: bool = False) -> None:
        """Take nothing more in, and (unless ``silent``) let the other end know."""
        if self.closed:
            return
        self.closed = True
        self.host.ends.discard(self)
        if not silent:
            # Behind all that was sent, or ahead of it: that is lost then.
            lane = self.lane if self.wire.rng.random() < 0.5 else None
            self.wire.carry(self.host.name, self.node, self.peer.reset, lane)

    def reset(self) -> None:
        """Take a reset from the network."""
        if not self.closed:
            self.closed = True
            self.host.ends.discard(self)
            self.owner.process.come(self, self._over)

    def _over(self) -> None:
        if not self.deaf:
            self.deaf = True
            self.owner.end_closed(self)

    def _arrives(self) -> bool:
        if self.closed:
            if self.host.powered:
                self.wire.carry(self.host.name, self.node, self.peer.reset)
            return False
        self.host.heard[self.node] = self.wire.agenda.now
        return True

    def _frame(self, frame: Frame) -> None:
        if self._arrives():
            self.owner.process.come(self, partial(self._take_frame, frame))

    def _take_frame(self, frame: Frame) -> None:
        if not self.deaf:
            self.owner.frame_came(self, frame)

    def _data(self, token: bytes, offset: int, data: bytes, tag: int) -> None:
        if self._arrives():
            # Data flows are not ordered with each other, nor with the control flow.
            self.owner.process.come((self, offset), partial(self.owner.data_came, self, token, offset, data, tag))


class Wire:
    """All machines and what is between them."""

    def __init__(self, agenda: Agenda, seed: int, timeout: float, hosts: list[str]) -> None:
        self.agenda = agenda
        self.rng = random.Random(f"{seed} wire")
        self.hosts = {name: Host(name) for name in hosts}
        self.blocked: Counter[tuple[str, str]] = Counter()
        self.slow: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._seed = seed
        self._timeout = timeout
        self._held: dict[tuple[str, str], list[Callback]] = {}
        self._rngs: dict[tuple[str, str], random.Random] = {}
        self._connections = 0

    def carry(self, source: str, target: str, arrive: Callback, lane: Lane | None = None) -> None:
        """Let ``arrive`` happen at ``target`` after a while; with ``lane`` not before what went that way earlier."""
        at = self.agenda.now + self._delay(source, target)
        if lane is not None:
            at = lane.arrival(at)
        self.agenda.at(at, partial(self._arrive, (source, target), arrive))

    def _arrive(self, way: tuple[str, str], arrive: Callback) -> None:
        if self.blocked[way] > 0:
            self._held.setdefault(way, []).append(arrive)
        else:
            arrive()

    def _delay(self, source: str, target: str) -> float:
        way = (source, target)
        rng = self._rngs.get(way)
        if rng is None:
            rng = self._rngs[way] = random.Random(f"{self._seed} {source} {target}")
        draw = rng.random()
        if self.slow[source] > 0:
            return draw * self._timeout / 4
        return 5e-5 + draw * (2e-3 if rng.random() < 0.1 else 3e-4)

    def block(self, ways: list[tuple[str, str]]) -> None:
        """Let nothing through."""
        self.blocked.update(ways)

    def unblock(self, ways: list[tuple[str, str]]) -> None:
        """Let everything through that no other partition holds; what was held back arrives now."""
        for way in ways:
            self.blocked[way] -= 1
            if self.blocked[way] == 0:
                for arrive in self._held.pop(way, []):
                    arrive()

    def fell(self, host: Host, *, silent: bool) -> None:
        """Take note that the agent of a machine ended; ``silent``: the machine itself has no power."""
        host.agent = None
        for end in sorted(host.ends, key=lambda end: end.number):
            end.deaf = True
            end.shut(silent=silent)

    def cut(self, one: str, other: str) -> bool:
        """Reset the connections between two machines; tells whether there were any."""
        ends = sorted((end for end in self.hosts[one].ends if end.node == other), key=lambda end: end.number)
        for end in ends:
            for side in (end, end.peer):
                self.agenda.after(self.rng.random() * 2e-3, side.reset)
        return bool(ends)

    def dial(self, owner: Owner, target: str, refused: Callback) -> None:
        """Connect to the machine ``target``: ``established`` of both owners follows, or ``refused``, or nothing."""
        source = owner.node
        host = self.hosts[target]

        def reached() -> None:
            agent = host.agent
            if not host.powered or (agent is not None and agent.closing):
                return
            if agent is None:
                self.carry(target, source, partial(owner.process.come, "dial", refused))
                return
            # The machine accepts; the agent answers when it runs.
            agent.process.come(("dial", source), partial(self.carry, target, source, partial(answered, agent)))

        def answered(agent: Owner) -> None:
            owner.process.come("dial", partial(made, agent))

        def made(agent: Owner) -> None:
            if self.hosts[source].agent is not owner:
                return
            self._connections += 2
            mine = End(self, self._connections, self.hosts[source], owner)
            theirs = End(self, self._connections + 1, host, agent)
            mine.peer, theirs.peer = theirs, mine
            if host.agent is not agent:
                theirs.closed = theirs.deaf = True
                host.ends.discard(theirs)
            finished = partial(self._finished, theirs)
            self.carry(source, target, finished, mine.lane)
            owner.established(mine)

        self.carry(source, target, reached)

    def _finished(self, end: End) -> None:
        if end._arrives():
            end.owner.process.come(end, partial(self._established, end))

    def _established(self, end: End) -> None:
        if not end.deaf:
            end.owner.established(end)
