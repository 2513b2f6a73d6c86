"""An urgent operation passes a large one that runs: on the way, in the kernels and for memory. Counted in tiles.

Each node has one data flow, cut and ordered by the transports' own outbox, and one kernel thread that takes the most
urgent job for a tile at a time, as ``_native.Pool`` does. A tick is one tile on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from tests.simulation.cluster import fingerprint

from allreduced.core.identity import GroupKey, Member
from allreduced.daemon.engine.actions import (
    Action,
    CreateArena,
    Deliver,
    DestroyArena,
    PostReceive,
    Reduce,
    Send,
    SendFrame,
    SetTimer,
)
from allreduced.daemon.engine.engine import Engine
from allreduced.daemon.engine.events import (
    ArenaReady,
    Event,
    FrameArrived,
    GroupStarted,
    Received,
    Reduced,
    Sent,
    Submitted,
)
from allreduced.daemon.engine.limits import Limits
from allreduced.daemon.engine.region import Region
from allreduced.protocol.peer import MoreGrants, Ready
from allreduced.transports.outbox import Outbox

TILE = 64
BULK = 4096
"""Tiles of the large operation: 256 MiB, if a tile were 64 KiB."""


@dataclass
class Running:
    """A kernel job and its tiles that are not done."""

    action: Reduce
    left: int


class Node:
    """An engine behind one data flow and one kernel thread."""

    def __init__(self, members: tuple[Member, ...], mine: int, limits: Limits) -> None:
        self.name = members[mine].node
        self.engine = Engine(self.name, limits)
        self.outbox = Outbox(TILE)
        self.jobs: list[Running] = []
        self.others: dict[str, Node] = {}
        self.routes: list[tuple[Node, int]] = []
        """By serial in the outbox: whose receive it goes to."""
        self.done: dict[int, int] = {}
        """By request: the tick of its last delivery."""
        self.tick = 0
        local = {rank: rank for rank in members[mine].ranks}
        self.engine.handle(GroupStarted(1, GroupKey(1, "j", "w"), 1, TILE, members, mine, local), 0.0)

    def submit(self, rank: int, request: int, tiles: int, priority: int, algorithm: str) -> None:
        described = fingerprint(count=tiles * TILE // 4, algorithm=algorithm)
        source = Region(request, 0, tiles * TILE)
        self.do(Submitted(rank, request, 1, rank, f"op{request}", described, source, 1e6, priority))

    def do(self, event: Event) -> None:
        for action in self.engine.handle(event, 0.0):
            self.perform(action)

    def perform(self, action: Action) -> None:
        if isinstance(action, CreateArena):
            self.do(ArenaReady(action.buffer))
        elif isinstance(action, Reduce):
            self.jobs.append(Running(action, -(-action.target.nbytes // TILE)))
        elif isinstance(action, Send):
            self.routes.append((self.others[action.node], int(action.token)))
            buffer = memoryview(bytes(action.region.nbytes))
            serial = len(self.routes) - 1
            self.outbox.add(action.send, serial, action.offset, buffer, action.tag, action.priority)
        elif isinstance(action, SendFrame):
            frame = action.frame
            if isinstance(frame, Ready | MoreGrants):
                grants = tuple(replace(grant, token=str(grant.receive).encode()) for grant in frame.grants)
                frame = replace(frame, grants=grants)
            self.others[action.node].do(FrameArrived(self.name, frame))
        elif isinstance(action, Deliver):
            self.done[action.request] = self.tick
        else:
            assert isinstance(action, PostReceive | SetTimer | DestroyArena), action

    def step(self) -> None:
        """Let a tile go and reduce one."""
        frame = self.outbox.take()
        if frame is not None:
            peer, receive = self.routes[frame.serial]
            peer.do(Received(receive, frame.offset, frame.length, frame.tag))
            over = self.outbox.finished(frame)
            if over is not None:
                self.do(Sent(over))
        if self.jobs:
            job = max(self.jobs, key=lambda job: job.action.priority)
            job.left -= 1
            if job.left == 0:
                self.jobs.remove(job)
                self.do(Reduced(job.action.job))


class Machine:
    """Nodes that step together; every node has ``ranks`` ranks."""

    def __init__(self, nodes: int, ranks: int, limits: Limits | None = None) -> None:
        members = tuple(
            Member(f"node{node}", 1, tuple(range(node * ranks, (node + 1) * ranks))) for node in range(nodes)
        )
        self.nodes = [Node(members, mine, limits or Limits(inline_bytes=0)) for mine in range(nodes)]
        for node in self.nodes:
            node.others = {other.name: other for other in self.nodes if other is not node}
        self.members = members

    def submit(self, request: int, tiles: int, priority: int, algorithm: str = "") -> None:
        for node, member in zip(self.nodes, self.members, strict=True):
            for rank in member.ranks:
                node.submit(rank, request, tiles, priority, algorithm)

    def step(self, ticks: int) -> None:
        for _ in range(ticks):
            for node in self.nodes:
                node.step()
            for node in self.nodes:
                node.tick += 1

    def finish(self, request: int, most: int) -> int:
        """Step until every node has the result; return the ticks that it took, ``most`` at most."""
        for ticks in range(most + 1):
            if all(request in node.done for node in self.nodes):
                return ticks
            self.step(1)
        raise AssertionError(f"request {request} has not ended after {most} tiles")


@pytest.mark.parametrize("before", [0, 1, 7, 200])
@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("algorithm", ["direct", "canonical", "ring"])
def test_an_urgent_operation_takes_two_tile_times_more_than_on_idle_nodes(
    algorithm: str, nodes: int, before: int
) -> None:
    idle = Machine(nodes, 2)
    idle.submit(2, 1, 5, algorithm)
    alone = idle.finish(2, 100)
    busy = Machine(nodes, 2)
    busy.submit(1, BULK, 0, algorithm)
    busy.step(before)
    busy.submit(2, 1, 5, algorithm)
    assert busy.finish(2, alone + 2) <= alone + 2
    assert not any(1 in node.done for node in busy.nodes)


def test_a_less_urgent_operation_waits_for_the_large_one() -> None:
    machine = Machine(2, 2)
    machine.submit(1, BULK, 0)
    machine.step(7)
    machine.submit(2, 1, -1)
    machine.finish(1, 10 * BULK)
    machine.finish(2, 100)
    assert all(node.done[1] <= node.done[2] + 2 for node in machine.nodes)


@pytest.mark.parametrize("before", [0, 1, 1000])
def test_a_large_reduction_on_one_node_does_not_hold_up_an_urgent_one(before: int) -> None:
    machine = Machine(1, 4)
    machine.submit(1, BULK, 0)
    machine.step(before)
    machine.submit(2, 1, 1)
    assert machine.finish(2, 2) <= 2
    assert machine.finish(1, 2 * BULK) >= BULK - before - 1


def test_operations_of_one_priority_share_the_flow() -> None:
    machine = Machine(2, 1)
    machine.submit(1, BULK, 0)
    machine.step(100)
    machine.submit(2, 8, 0)
    machine.finish(2, 100)
    assert not any(1 in node.done for node in machine.nodes)
