"""A driver between pure parts that follow a script, and fakes of everything that it drives."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from allreduced.core.dtypes import DType
from allreduced.core.errors import AllReducedError
from allreduced.core.identity import GroupKey, Member
from allreduced.core.reductions import Reduction
from allreduced.daemon.arena_table import ArenaLimits, ArenaTable
from allreduced.daemon.driver import Driver
from allreduced.daemon.engine import actions, events
from allreduced.daemon.engine.region import FIRST_ENGINE_BUFFER as RESULT
from allreduced.daemon.engine.region import Region
from allreduced.daemon.membership import actions as membership_actions
from allreduced.daemon.membership import events as membership_events
from allreduced.daemon.ports import Result
from allreduced.protocol.handshake import HIGHEST_VERSION
from allreduced.protocol.peer import Fingerprint, Frame
from allreduced.transports.base import Link, LinkStats, PeerIdentity

GROUP = 11


PRIVATE = RESULT + 1


FINGERPRINT = Fingerprint("all_reduce", 1, 1, "(4,)", 4, -1, "")


@dataclass
class Script:
    """A pure part that answers each event with what the test says, and remembers the events."""

    answer: Callable[[object], Sequence[object]] = lambda event: ()
    events: list[object] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    idle: bool = True

    def handle(self, event: object, now: float) -> list[object]:
        self.events.append(event)
        self.times.append(now)
        self.changed.set()
        return list(self.answer(event))

    async def saw(self, event: object) -> None:
        async with asyncio.timeout(10):
            while event not in self.events:
                self.changed.clear()
                await self.changed.wait()


class FakeKernels:
    """Sums float32 with NumPy; queued jobs complete when the test says so."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.queued: list[tuple[int, int, int]] = []
        self._done: list[int] = []
        self.at_once = 0
        self.fails = False

    def reduce(
        self,
        dtype: int,
        reduction: int,
        divisor: int,
        count: int,
        sources: Sequence[int],
        target: int,
        *,
        partials: int,
        partial_target: bool,
    ) -> None:
        if self.fails:
            raise ValueError("unknown reduction")
        self.at_once += 1

    def submit(
        self,
        job: int,
        dtype: int,
        reduction: int,
        divisor: int,
        count: int,
        sources: Sequence[int],
        target: int,
        priority: int,
        *,
        partials: int,
        partial_target: bool,
        share: int,
    ) -> None:
        self.queued.append((job, priority, share))

    def complete(self, job: int) -> None:
        self._done.append(job)
        os.eventfd_write(self._descriptor, 1)

    def completed(self) -> list[int]:
        os.eventfd_read(self._descriptor)
        done, self._done = self._done, []
        return done

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)


class FakeLink(Link):
    """Records calls; the test calls the driver back."""

    def __init__(self, node: str) -> None:
        self.peer = PeerIdentity(node, 1)
        self.version = HIGHEST_VERSION
        self.initiator = True
        self.remote_address = self.local_address = "fake://"
        self.stats = LinkStats()
        self.last_received = 0.0
        self.posted: dict[int, memoryview] = {}
        self.sends: dict[int, tuple[bytes, int, memoryview, int, int, int]] = {}
        self.calls: list[tuple[str, int]] = []

    def send_control(self, payload: bytes) -> None:
        raise NotImplementedError

    def post_receive(self, receive: int, buffer: memoryview) -> bytes:
        self.posted[receive] = buffer
        return b"token%d" % receive

    def cancel_receive(self, receive: int) -> None:
        self.calls.append(("cancel_receive", receive))

    def send(
        self,
        send: int,
        token: bytes,
        offset: int,
        buffer: memoryview,
        *,
        tag: int = 0,
        priority: int = 0,
        share: int = 0,
    ) -> None:
        self.sends[send] = (token, offset, buffer, tag, priority, share)

    def cancel_send(self, send: int) -> None:
        self.calls.append(("cancel_send", send))

    def abort(self, error: AllReducedError) -> None:
        raise NotImplementedError

    async def close(self, timeout: float) -> None:
        raise NotImplementedError


class FakePeers:
    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        self.frames: list[tuple[str, Frame]] = []

    def send_frame(self, node: str, frame: Frame) -> None:
        self.frames.append((node, frame))

    def link(self, node: str) -> Link | None:
        return self.links.get(node)


class FakeClients:
    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def admitted(self, client: int, request: int, rank: int, started: events.GroupStarted) -> None:
        self.told.append(("admitted", client, request, rank, started.group))

    def failed(self, client: int, request: int, error: AllReducedError) -> None:
        self.told.append(("failed", client, request, type(error)))

    def delivered(self, client: int, request: int, result: Result) -> None:
        copied = bytes(result.data) if result.data is not None else None
        self.told.append(("delivered", client, request, copied, *result[1:5], result.algorithm))

    def arena_gone(self, arena: int) -> None:
        self.told.append(("arena_gone", arena))

    def group_ended(self, clients: Sequence[int], group: int, error: AllReducedError) -> None:
        self.told.append(("group_ended", tuple(clients), group, type(error)))


@dataclass
class Rig:
    engine: Script
    membership: Script
    kernels: FakeKernels
    arenas: ArenaTable
    peers: FakePeers
    clients: FakeClients
    driver: Driver

    async def buffers(self) -> None:
        """Make a result arena of the group and a private one."""
        self.do(actions.CreateArena(RESULT, GROUP, 1 << 18), actions.CreateArena(PRIVATE, 0, 1 << 12))
        await self.engine.saw(events.ArenaReady(RESULT))
        await self.engine.saw(events.ArenaReady(PRIVATE))
        self.engine.events.clear()

    def do(self, *todo: actions.Action) -> None:
        """Have the engine ask for these actions."""
        waiting = [list(todo)]
        before = self.engine.answer
        self.engine.answer = lambda event: waiting.pop() if waiting else before(event)
        self.driver.engine_event(events.TimePassed())
        self.engine.answer = before
        self.engine.events.remove(events.TimePassed())

    def link(self, node: str) -> FakeLink:
        link = FakeLink(node)
        self.peers.links[node] = link
        return link

    def form(self, group: int = GROUP) -> events.GroupStarted:
        member = Member("n0", 1, (0, 1))
        started = events.GroupStarted(group, GroupKey(0, "j", "world"), 1, 1 << 20, (member,), 0, {0: 100, 1: 101})
        self.membership.answer = lambda event: [
            membership_actions.TellEngine(started),
            membership_actions.Admit(100, 1, 0, started),
        ]
        self.driver.membership_event(membership_events.TimePassed())
        self.membership.answer = lambda event: ()
        return started


@asynccontextmanager
async def rigged() -> AsyncIterator[Rig]:
    engine, membership, kernels, peers, clients = Script(), Script(), FakeKernels(), FakePeers(), FakeClients()
    arenas = ArenaTable(ArenaLimits.from_total(1 << 24))
    driver = Driver(engine, membership, kernels, arenas)  # type: ignore[arg-type] # the script takes any event
    driver.attach(clients, peers)
    driver.start()
    yield Rig(engine, membership, kernels, arenas, peers, clients, driver)
    driver.close()
    kernels.close()
    for link in peers.links.values():
        if isinstance(link, FakeLink):
            link.posted.clear()
            link.sends.clear()
    await arenas.close()


def given_up(rig: Rig) -> list[tuple[int, type]]:
    """Return which groups the memberships were told to give up, and for what kind of error."""
    told = [event for event in rig.membership.events if isinstance(event, membership_events.GiveUp)]
    return [(event.group, type(event.error)) for event in told]


def submitted(request: int = 1, client: int = 100) -> events.Submitted:
    return events.Submitted(client, request, GROUP, 0, "", FINGERPRINT, None, 1e9, 0)


def reduce(job: int, nbytes: int, target: Region | None = None) -> actions.Reduce:
    region = target or Region(RESULT, 0, nbytes)
    return actions.Reduce(job, DType.FLOAT32, Reduction.SUM, 1, nbytes // 4, (region,), region, 3, share=1001)
