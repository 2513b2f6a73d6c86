"""What an agent does with memory: arenas, kernel jobs, receives and sends, each at its own pace, and the rules of it.

The rules, checked whenever something is begun or done:

- what a receive is posted into is no other receive's until it has landed or the cancellation is complete, and no arena
  is dropped under it;
- data that lands, and kernels that write, do so where nobody reads at that moment;
- the client may write its input, and the arena of a result may be dropped, once the engine said so: nothing reads or
  writes there any more.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from tests.simulation.kernels import fold, numpy_dtype
from tests.simulation.whole.process import Process
from tests.simulation.whole.wire import End

from allreduced.core.dtypes import DType
from allreduced.core.errors import AllReducedError, LimitExceeded
from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.actions import CreateArena, PostReceive, Reduce, Send
from allreduced.daemon.engine.events import (
    ArenaFailed,
    ArenaReady,
    Event,
    ReceiveCancelled,
    Received,
    Reduced,
    Sent,
)
from allreduced.daemon.engine.region import Region

DELAY = 3e-4
"""Seconds that a job, or a step of a send, takes at most (mostly)."""


class MemoryRule(AssertionError):
    """Memory was used by two at a time, or after it was given back."""


@dataclass(slots=True, eq=False)
class _Posted:
    receive: int
    end: End
    serial: bytes
    region: Region
    missing: list[tuple[int, int]]
    """[start, end) of the bytes that have not landed."""
    cancelled: bool = False

    def awaits(self, region: Region) -> bool:
        """Tell whether something may still land in ``region``."""
        mine, first = self.region, region.offset - self.region.offset
        if mine.buffer != region.buffer or first >= mine.nbytes or first + region.nbytes <= 0:
            return False
        return any(start < first + region.nbytes and first < end for start, end in self.missing)

    def landed(self, offset: int, nbytes: int) -> bool:
        """Take note of bytes that land; False where they landed before."""
        for at, (start, end) in enumerate(self.missing):
            if start <= offset and offset + nbytes <= end:
                rest = [(start, offset), (offset + nbytes, end)]
                self.missing[at : at + 1] = [piece for piece in rest if piece[0] < piece[1]]
                return True
        return False


@dataclass(slots=True, eq=False)
class _Outgoing:
    end: End
    region: Region
    pieces: list[tuple[int, int]]
    cancelled: bool = False


class Workshop:
    """The memory of one start of an agent. ``tell`` takes what the engine must hear of."""

    def __init__(self, process: Process, rng: random.Random, tell: Callable[[Event], None], limit: int) -> None:
        self.buffers: dict[int, npt.NDArray[np.uint8]] = {}
        self.no_arenas = 0
        """While positive, no arena can be made."""
        self._process = process
        self._rng = rng
        self._tell = tell
        self._limit = limit
        self._arenas: dict[int, int] = {}
        self._creating: set[int] = set()
        self._posted: dict[int, _Posted] = {}
        self._by_token: dict[tuple[End, bytes], _Posted] = {}
        self._outgoing: dict[int, _Outgoing] = {}
        self._jobs: dict[int, Reduce] = {}

    def view(self, region: Region) -> npt.NDArray[np.uint8]:
        """Return the bytes of a region."""
        whole = self.buffers.get(region.buffer)
        if whole is None or region.offset < 0 or region.offset + region.nbytes > len(whole):
            raise MemoryRule(f"{region} is not there (any more)")
        return whole[region.offset : region.offset + region.nbytes]

    @property
    def busy(self) -> tuple[int, int, int]:
        """How many receives, sends and jobs there are."""
        return len(self._posted), len(self._outgoing), len(self._jobs)

    @property
    def arenas(self) -> int:
        """How many arenas there are."""
        return len(self._arenas)

    # Arenas

    def create(self, action: CreateArena) -> None:
        """Make an arena, or fail to."""
        self._creating.add(action.buffer)
        fits = not self.no_arenas and sum(self._arenas.values()) + action.nbytes <= self._limit
        if fits:
            self._arenas[action.buffer] = action.nbytes

        def made() -> None:
            self._creating.discard(action.buffer)
            if fits:
                self.buffers[action.buffer] = np.full(action.nbytes, 0xA5, np.uint8)
                self._tell(ArenaReady(action.buffer))
            else:
                error: AllReducedError = LimitExceeded("no memory", limit="limits.arena_bytes")
                self._tell(ArenaFailed(action.buffer, error))

        self._process.after(self._rng.random() * 2 * DELAY, "arenas", made)

    def destroy(self, buffer: int) -> None:
        """Drop an arena."""
        if buffer in self._creating:
            raise MemoryRule("an arena is dropped before it is made")
        used = [posted.region for posted in self._posted.values()]
        used += [outgoing.region for outgoing in self._outgoing.values()]
        used += [region for job in self._jobs.values() for region in (*job.sources, job.target)]
        if any(region.buffer == buffer for region in used):
            raise MemoryRule("an arena is dropped while it is used")
        del self.buffers[buffer], self._arenas[buffer]

    # Kernels

    def reduce(self, action: Reduce) -> None:
        """Start a kernel job."""
        kind = action.dtype.accumulator if action.partial_target else action.dtype
        wanted = [action.count * dtype.itemsize for dtype in (*_source_types(action), kind)]
        if [region.nbytes for region in (*action.sources, action.target)] != wanted or not action.sources:
            raise MemoryRule(f"regions of wrong sizes: {action}")
        self._check_unread(action.target, "a kernel writes")
        # A final value may be awaited where the partial one is made: the receive may be there, but not from before.
        self._check_unposted(action.target, "a kernel writes", cancelled=True)
        for source in action.sources:
            if source != action.target and _overlap(source, action.target):
                raise MemoryRule("a kernel's source overlaps its target")
            for job in self._jobs.values():
                if _overlap(source, job.target):
                    raise MemoryRule("a kernel reads what another one writes")
        self._jobs[action.job] = action
        if self._rng.random() < 0.5:  # on the loop
            self._computed(action)
            self._tell(Reduced(action.job))
            return

        def done() -> None:
            self._computed(action)
            self._process.after(self._rng.random() * 5e-5, "kernels", partial(self._tell, Reduced(action.job)))

        self._process.after(self._rng.random() * DELAY, "kernels", done)

    def _computed(self, action: Reduce) -> None:
        sources = [
            self.view(region).view(numpy_dtype(dtype))
            for region, dtype in zip(action.sources, _source_types(action), strict=True)
        ]
        value = fold(action.dtype, Reduction(action.reduction), action.divisor, sources, wide=action.partial_target)
        self.view(action.target)[:] = value.view(np.uint8)
        del self._jobs[action.job]

    # Receives

    def post(self, action: PostReceive, end: End) -> None:
        """Post a receive on a connection."""
        if action.receive in self._posted or action.region.nbytes <= 0:
            raise MemoryRule(f"cannot be posted: {action}")
        self.view(action.region)
        self._check_unposted(action.region, "a receive is posted")
        for job in self._jobs.values():
            if any(_overlap(action.region, region) for region in (*job.sources, job.target)):
                raise MemoryRule(f"a receive is posted where kernel job {job.job} works")
        end.serials += 1
        posted = _Posted(action.receive, end, f"{end.number}.{end.serials}".encode(), action.region, [])
        posted.missing.append((0, action.region.nbytes))
        self._posted[action.receive] = self._by_token[end, posted.serial] = posted

    def token(self, receive: int) -> bytes:
        """Return the token of a posted receive; empty if it is not posted (any more)."""
        posted = self._posted.get(receive)
        return posted.serial if posted is not None else b""

    def cancel_receive(self, receive: int) -> None:
        """Close a receive; data may land until that is done."""
        posted = self._posted.get(receive)
        if posted is None:
            self._tell(ReceiveCancelled(receive))
        elif not posted.cancelled:
            posted.cancelled = True
            self._process.after(self._rng.random() * 2 * DELAY, posted.end, partial(self._receive_over, posted))

    def _receive_over(self, posted: _Posted) -> None:
        if self._posted.get(posted.receive) is posted:
            self._unpost(posted)
            self._tell(ReceiveCancelled(posted.receive))

    def _unpost(self, posted: _Posted) -> None:
        del self._posted[posted.receive], self._by_token[posted.end, posted.serial]

    def land(self, end: End, token: bytes, offset: int, data: bytes, tag: int) -> None:
        """Take a piece of data from the network."""
        posted = self._by_token.get((end, token))
        if posted is None:
            return
        if not posted.landed(offset, len(data)):
            raise MemoryRule(f"bytes {offset} to {offset + len(data)} came twice, or are outside: {posted}")
        region = Region(posted.region.buffer, posted.region.offset + offset, len(data))
        self._check_unread(region, "data lands")
        self.view(region)[:] = np.frombuffer(data, np.uint8)
        if posted.cancelled or end.deaf:
            return
        if not posted.missing:
            self._unpost(posted)
        self._tell(Received(posted.receive, offset, len(data), tag))

    # Sends

    def send(self, action: Send, end: End) -> None:
        """Send piece by piece; the memory is read as each piece goes out."""
        if not action.token or action.region.nbytes <= 0:
            raise MemoryRule(f"cannot be sent: {action}")
        pieces, start, nbytes = [], 0, action.region.nbytes
        size = self._rng.choice((nbytes, nbytes, 96, 512))
        while start < nbytes:
            pieces.append((start, min(nbytes, start + size)))
            start += size
        outgoing = self._outgoing[action.send] = _Outgoing(end, action.region, pieces)

        def step() -> None:
            if self._outgoing.get(action.send) is not outgoing:
                return
            if outgoing.pieces and not outgoing.cancelled:
                first, last = outgoing.pieces.pop(0)
                region = Region(action.region.buffer, action.region.offset + first, last - first)
                end.send_data(action.token, action.offset + first, self.view(region).tobytes(), action.tag)
                self._process.after(self._rng.random() * DELAY / 3, "sends", step)
            else:
                del self._outgoing[action.send]
                self._tell(Sent(action.send))

        self._process.after(self._rng.random() * DELAY / 3, "sends", step)

    def cancel_send(self, send: int) -> None:
        """Stop a send."""
        outgoing = self._outgoing.get(send)
        if outgoing is not None:
            outgoing.cancelled = True

    def closed(self, end: End) -> None:
        """Take note that a connection is over: nothing lands any more, and nothing is read for it."""
        for posted in [posted for posted in self._posted.values() if posted.end is end]:
            self._receive_over(posted)
        for number in [number for number, outgoing in self._outgoing.items() if outgoing.end is end]:
            del self._outgoing[number]
            self._tell(Sent(number))

    # Rules

    def check_free(self, region: Region, what: str) -> None:
        """Fail if anybody reads or writes ``region``, or may do so."""
        self._check_unread(region, what)
        self._check_unposted(region, what)

    def _check_unread(self, region: Region, what: str) -> None:
        for job in self._jobs.values():
            for other in (*job.sources, job.target):
                if _overlap(region, other):
                    raise MemoryRule(f"{what} where kernel job {job.job} works")
        for outgoing in self._outgoing.values():
            if outgoing.cancelled or outgoing.region.buffer != region.buffer:
                continue
            for start, end in outgoing.pieces:
                piece = Region(outgoing.region.buffer, outgoing.region.offset + start, end - start)
                if _overlap(region, piece):
                    raise MemoryRule(f"{what} where a send still reads")

    def _check_unposted(self, region: Region, what: str, *, cancelled: bool = False) -> None:
        for posted in self._posted.values():
            if posted.cancelled >= cancelled and posted.awaits(region):
                state = "is being cancelled" if posted.cancelled else "is posted"
                raise MemoryRule(f"{what} where receive {posted.receive} {state}")


def _overlap(one: Region, other: Region) -> bool:
    return (
        one.buffer == other.buffer
        and one.offset < other.offset + other.nbytes
        and other.offset < one.offset + one.nbytes
    )


def _source_types(action: Reduce) -> list[DType]:
    elements = len(action.sources) - action.partials
    return [action.dtype] * elements + [action.dtype.accumulator] * action.partials
