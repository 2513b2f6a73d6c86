"""One simulated node: an engine, its buffers, and what a driver would do with its actions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tests.simulation.agenda import Agenda
from tests.simulation.kernels import fold, numpy_dtype

from allreduced.core.dtypes import DType
from allreduced.core.errors import LimitExceeded
from allreduced.daemon.engine.actions import (
    Action,
    CancelReceive,
    CancelSend,
    CreateArena,
    Deliver,
    DestroyArena,
    Fail,
    Frozen,
    GiveUp,
    PostReceive,
    Reduce,
    Send,
    SendFrame,
    SetTimer,
)
from allreduced.daemon.engine.engine import Engine
from allreduced.daemon.engine.events import (
    ArenaFailed,
    ArenaReady,
    Event,
    FrameArrived,
    GroupBroken,
    ReceiveCancelled,
    Received,
    Reduced,
    Sent,
    TimePassed,
)
from allreduced.daemon.engine.limits import Limits
from allreduced.daemon.engine.region import Region
from allreduced.protocol.peer import EngineFrame, Fetch, MoreGrants, Ready


class Peers(Protocol):
    """What a node needs from the network."""

    def control(self, source: str, target: str, frame: EngineFrame) -> None:
        """Carry a control frame, in order per pair."""

    def data(self, source: str, target: str, receive: int, offset: int, data: bytes, tag: int) -> None:
        """Carry a piece of data, in any order."""


class Answers(Protocol):
    """What a node tells the clients."""

    def delivered(self, node: SimulatedNode, action: Deliver, data: bytes | None) -> None:
        """Take a result; ``data`` is None where there is none or where it is read under the lease."""

    def failed(self, node: SimulatedNode, action: Fail) -> None:
        """Take an error."""


@dataclass(slots=True)
class _Posted:
    node: str
    region: Region
    left: int


@dataclass(slots=True)
class _Sending:
    region: Region
    node: str
    pieces: list[tuple[int, int]]
    cancelled: bool = False


class SimulatedNode:
    """Runs an engine. Delays and orders come from ``rng``; the memory rules are checked on the way."""

    def __init__(
        self, name: str, limits: Limits, agenda: Agenda, rng: random.Random, peers: Peers, answers: Answers
    ) -> None:
        self.name = name
        self.engine = Engine(name, limits)
        self.buffers: dict[int, npt.NDArray[np.uint8]] = {}
        self.alive = True
        self.arena_failures = 0.0
        """Chance that an arena cannot be made."""
        self.other_bytes = 0
        """What the agent's other memory takes of the limit."""
        self._limit = limits.arena_bytes
        self._arenas: dict[int, int] = {}
        self._agenda = agenda
        self._rng = rng
        self._peers = peers
        self._answers = answers
        self._posted: dict[int, _Posted] = {}
        self._sendings: dict[int, _Sending] = {}
        self._jobs: dict[int, Reduce] = {}
        self._creating: set[int] = set()
        self._timer = 0
        self.log: list[Action] = []
        self.frozen: dict[int, Frozen] = {}
        """By group: what the engine had of the last generation that it froze."""
        self._handlers: dict[type, Callable[..., None]] = {
            CreateArena: self._create_arena,
            DestroyArena: self._destroy_arena,
            Reduce: self._reduce,
            PostReceive: self._post_receive,
            CancelReceive: self._cancel_receive,
            Send: self._send,
            CancelSend: self._cancel_send,
            SendFrame: self._send_frame,
            Deliver: self._deliver,
            Fail: self._fail,
            SetTimer: self._set_timer,
            Frozen: self._frozen,
            GiveUp: lambda action: self.later(0.0, GroupBroken(action.group, action.error)),
        }

    def tell(self, event: Event) -> None:
        """Give the engine an event now and do what it wants."""
        if not self.alive:
            return
        actions: list[Action] = self.engine.handle(event, self._agenda.now)
        self.log += actions
        for action in actions:
            self._handlers[type(action)](action)

    def later(self, delay: float, event: Event) -> None:
        """Give the engine an event in ``delay`` seconds."""
        self._agenda.after(delay, lambda: self.tell(event))

    def view(self, region: Region) -> npt.NDArray[np.uint8]:
        """Return the bytes of a region."""
        whole = self.buffers[region.buffer]
        assert region.offset >= 0, region
        assert region.offset + region.nbytes <= len(whole), region
        return whole[region.offset : region.offset + region.nbytes]

    def land(self, source: str, receive: int, offset: int, data: bytes, tag: int) -> None:
        """Take a piece of data from the network."""
        posted = self._posted.get(receive)
        if posted is None or not self.alive:
            return
        assert posted.node == source
        region = Region(posted.region.buffer, posted.region.offset + offset, len(data))
        self._check_free(region, "data lands")
        self.view(region)[:] = np.frombuffer(data, np.uint8)
        posted.left -= len(data)
        assert posted.left >= 0
        if posted.left == 0:
            del self._posted[receive]
        cut = self._rng.randint(0, len(data)) if self._rng.random() < 0.3 else 0
        for start, end in ((0, cut), (cut, len(data))):
            if start != end:
                self.tell(Received(receive, offset + start, end - start, tag))

    def outstanding(self) -> dict[str, int]:
        """Return how much is under way that the engine must still hear of."""
        return {"receives": len(self._posted), "sends": len(self._sendings), "jobs": len(self._jobs)}

    def _delay(self, scale: float = 1.0) -> float:
        return self._rng.random() * scale * 1e-3

    def _create_arena(self, action: CreateArena) -> None:
        self._creating.add(action.buffer)
        fits = sum(self._arenas.values()) + self.other_bytes + action.nbytes <= self._limit
        if fits:
            self._arenas[action.buffer] = action.nbytes

        def made() -> None:
            self._creating.discard(action.buffer)
            if not fits or self._rng.random() < self.arena_failures:
                self._arenas.pop(action.buffer, None)
                self.tell(ArenaFailed(action.buffer, LimitExceeded("no memory", limit="limits.arena_bytes")))
                return
            self.buffers[action.buffer] = np.full(action.nbytes, 0xA5, np.uint8)
            self.tell(ArenaReady(action.buffer))

        self._agenda.after(self._delay(2), made)

    def _destroy_arena(self, action: DestroyArena) -> None:
        assert action.buffer not in self._creating
        used = [posted.region for posted in self._posted.values()]
        used += [sending.region for sending in self._sendings.values()]
        used += [region for job in self._jobs.values() for region in (*job.sources, job.target)]
        assert all(region.buffer != action.buffer for region in used)
        del self.buffers[action.buffer], self._arenas[action.buffer]

    def _reduce(self, action: Reduce) -> None:
        assert [region.nbytes for region in action.sources] == [
            action.count * dtype.itemsize for dtype in _source_types(action)
        ]
        kind = action.dtype.accumulator if action.partial_target else action.dtype
        assert action.target.nbytes == action.count * kind.itemsize
        self._check_free(action.target, "a kernel writes")
        for source in action.sources:
            if source != action.target:
                assert not _overlap(source, action.target)
                self._check_not_written(source)
        self._jobs[action.job] = action
        early = self._rng.random() < 0.5
        value = self._compute(action) if early else None

        def done() -> None:
            self.view(action.target)[:] = value if value is not None else self._compute(action)
            del self._jobs[action.job]
            self._agenda.after(self._delay(0.2), lambda: self.tell(Reduced(action.job)))

        self._agenda.after(self._delay(), done)

    def _compute(self, action: Reduce) -> npt.NDArray[np.uint8]:
        assert len(action.sources) >= 1
        sources = [
            self.view(region).view(numpy_dtype(dtype))
            for region, dtype in zip(action.sources, _source_types(action), strict=True)
        ]
        value = fold(action.dtype, action.reduction, action.divisor, sources, wide=action.partial_target)
        return value.view(np.uint8)

    def _post_receive(self, action: PostReceive) -> None:
        assert action.receive not in self._posted
        assert action.region.nbytes > 0
        self.view(action.region)
        self._posted[action.receive] = _Posted(action.node, action.region, action.region.nbytes)

    def _cancel_receive(self, action: CancelReceive) -> None:
        if action.receive not in self._posted:
            return

        def closed() -> None:
            if self._posted.pop(action.receive, None) is not None:
                self.tell(ReceiveCancelled(action.receive))

        self._agenda.after(self._delay(), closed)

    def _send(self, action: Send) -> None:
        assert action.token
        assert action.region.nbytes > 0
        pieces, start = [], 0
        while start < action.region.nbytes:
            end = min(action.region.nbytes, start + self._rng.choice((1, 7, 64, 200, 4096)))
            pieces.append((start, end))
            start = end
        sending = _Sending(action.region, action.node, pieces)
        self._sendings[action.send] = sending

        def step() -> None:
            if sending.pieces and not sending.cancelled:
                first, last = sending.pieces.pop(0)
                region = Region(action.region.buffer, action.region.offset + first, last - first)
                data = self.view(region).tobytes()
                self._peers.data(self.name, action.node, int(action.token), action.offset + first, data, action.tag)
                self._agenda.after(self._delay(0.3), step)
            else:
                del self._sendings[action.send]
                self._agenda.after(self._delay(0.3), lambda: self.tell(Sent(action.send)))

        self._agenda.after(self._delay(0.3), step)

    def _cancel_send(self, action: CancelSend) -> None:
        if action.send in self._sendings:
            self._sendings[action.send].cancelled = True

    def _send_frame(self, action: SendFrame) -> None:
        frame = action.frame
        if isinstance(frame, Fetch | MoreGrants | Ready):
            for grant in frame.grants:
                assert self._posted[grant.receive].node == action.node
            grants = tuple(replace(grant, token=str(grant.receive).encode()) for grant in frame.grants)
            frame = replace(frame, grants=grants)
        self._peers.control(self.name, action.node, frame)

    def _deliver(self, action: Deliver) -> None:
        data = self.view(action.region).tobytes() if action.region is not None and action.lease == 0 else None
        self._answers.delivered(self, action, data)

    def _fail(self, action: Fail) -> None:
        self._answers.failed(self, action)

    def _frozen(self, action: Frozen) -> None:
        self.frozen[action.group] = action

    def _set_timer(self, action: SetTimer) -> None:
        self._timer += 1
        number = self._timer
        if action.at is not None:

            def passed() -> None:
                if number == self._timer:
                    self.tell(TimePassed())

            self._agenda.at(action.at, passed)

    def take_frame(self, source: str, frame: EngineFrame) -> None:
        """Take a control frame from the network."""
        self.tell(FrameArrived(source, frame))

    def _check_free(self, region: Region, what: str) -> None:
        """Fail if somebody reads or writes ``region``."""
        for job in self._jobs.values():
            for other in (*job.sources, job.target):
                assert not _overlap(region, other), f"{what} where kernel job {job.job} works"
        for sending in self._sendings.values():
            for start, end in sending.pieces if not sending.cancelled else ():
                piece = Region(sending.region.buffer, sending.region.offset + start, end - start)
                assert not _overlap(region, piece), f"{what} where a send still reads"

    def _check_not_written(self, region: Region) -> None:
        for job in self._jobs.values():
            assert not _overlap(region, job.target), "a kernel reads what another one writes"


def _overlap(one: Region, other: Region) -> bool:
    return (
        one.buffer == other.buffer
        and one.offset < other.offset + other.nbytes
        and other.offset < one.offset + one.nbytes
    )


def _source_types(action: Reduce) -> list[DType]:
    elements = len(action.sources) - action.partials
    return [action.dtype] * elements + [action.dtype.accumulator] * action.partials
