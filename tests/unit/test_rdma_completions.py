"""When a completion queue is polled, and when an event is asked for."""

from __future__ import annotations

import asyncio
import os
from collections import deque

import pytest
from tests.support.fake_verbs import FakeFabric, FakeVerbs
from tests.support.rdma_rig import turns

from allreduced.transports.base import LinkStats
from allreduced.transports.rdma.completions import BATCH, MOST_POLLS, CompletionWatch
from allreduced.transports.rdma.devices import choose
from allreduced.transports.rdma.endpoint import Endpoint
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.verbs_port import Completion, CompletionKind, VerbsError


class _Queue:
    """Gives what a test puts in, and writes down what it is asked."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.entries: deque[Completion] = deque()
        self.asked: list[str] = []
        self.when_armed = 0
        self.broken = ""

    def add(self, count: int) -> None:
        self.entries.extend(Completion(k, CompletionKind.SENT, 1) for k in range(count))

    def ring(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def arm(self, *, solicited_only: bool = False) -> None:
        self.asked.append("arm solicited" if solicited_only else "arm")
        self.add(self.when_armed)
        self.when_armed = 0

    def take_event(self) -> None:
        os.eventfd_read(self.descriptor)
        self.asked.append("event")

    def poll(self, most: int) -> list[Completion]:
        if self.broken:
            raise VerbsError(self.broken)
        found = [self.entries.popleft() for _ in range(min(most, len(self.entries)))]
        self.asked.append(f"poll {len(found)}")
        return found

    def close(self) -> None:
        os.close(self.descriptor)


class _Watched:
    def __init__(self, *, solicited_only: bool = False) -> None:
        self.queue = _Queue()
        self.stats = LinkStats()
        self.got: list[int] = []
        self.errors: list[str] = []
        self.watch = CompletionWatch(
            asyncio.get_running_loop(),
            self.queue,
            self.stats,
            lambda found: self.got.append(len(found)),
            lambda error: self.errors.append(str(error)),
            solicited_only=solicited_only,
        )
        self.watch.start()

    def end(self) -> None:
        self.watch.stop()
        self.queue.close()


async def test_an_idle_queue_is_armed_once_and_left_alone() -> None:
    watched = _Watched(solicited_only=True)
    await turns(50)
    assert watched.queue.asked == ["poll 0", "arm solicited", "poll 0"]
    assert (watched.got, watched.stats.completion_events) == ([], 0)
    watched.end()


async def test_what_came_before_it_was_armed_is_found_without_an_event() -> None:
    watched = _Watched()
    watched.queue.when_armed = 3
    await turns(50)
    assert watched.got == [3]
    assert watched.stats.completion_events == 0
    watched.end()


async def test_one_event_brings_everything_in_batches() -> None:
    watched = _Watched()
    await turns(50)
    watched.queue.add(2 * BATCH + 1)
    watched.queue.ring()
    await turns(50)
    assert watched.got == [BATCH, BATCH, 1]
    assert watched.stats.completion_events == 1
    watched.end()


async def test_polling_in_vain_is_bounded_and_adapts() -> None:
    watched = _Watched()
    await turns(50)
    # Looking again pays several times: completions come right after a poll that found none.
    for _ in range(10):
        watched.queue.when_armed = 1
        watched.queue.ring()
        await turns(20)
    watched.queue.asked.clear()
    watched.queue.ring()
    await turns(50)
    vain = watched.queue.asked.index("arm")
    assert 1 <= vain <= MOST_POLLS + 2
    for _ in range(5):
        watched.queue.asked.clear()
        watched.queue.ring()
        await turns(50)
    assert watched.queue.asked == ["event", "poll 0", "arm", "poll 0"]
    watched.end()


async def test_a_queue_that_fails_is_told_of() -> None:
    watched = _Watched()
    await turns(50)
    watched.queue.broken = "gone"
    watched.queue.ring()
    await turns(50)
    assert watched.errors == ["gone"]
    watched.end()


async def test_nothing_is_called_after_the_stop() -> None:
    watched = _Watched()
    watched.queue.add(3)
    watched.watch.stop()
    watched.watch.stop()
    await turns(20)
    assert watched.got == []
    watched.queue.close()


def _endpoint(fabric: FakeFabric) -> Endpoint:
    verbs = FakeVerbs(fabric)
    options = RdmaOptions(depth=8)
    return Endpoint(verbs, choose(verbs.devices(), options, "127.0.0.1"), options, 3)


def test_an_endpoint_gives_everything_back_however_much_it_holds() -> None:
    fabric = FakeFabric()
    endpoint = _endpoint(fabric)
    assert fabric.open == {"device": 1, "domain": 1, "queue": 2, "region": 2, "pair": 3}
    endpoint.register(4096, 100, writable=True)
    endpoint.close()
    endpoint.close()
    assert fabric.leaks() == {}


@pytest.mark.parametrize("limit", [7, 0])
def test_an_endpoint_that_cannot_be_made_whole_leaves_nothing(limit: int) -> None:
    fabric = FakeFabric()
    fabric.max_depth = limit or fabric.max_depth
    fabric.max_registration = fabric.max_registration if limit else 100
    with pytest.raises(VerbsError):
        _endpoint(fabric)
    assert fabric.leaks() == {}


def test_more_than_half_of_the_machine_is_never_pinned() -> None:
    fabric = FakeFabric()
    endpoint = _endpoint(fabric)
    with pytest.raises(VerbsError, match="more than half of the memory"):
        endpoint.register(4096, 1 << 60, writable=True)
    endpoint.close()
    assert fabric.leaks() == {}
