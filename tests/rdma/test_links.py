"""What breaks under a link on real verbs, while it sends: the queue pairs, the port, the device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.contract.conftest import Endpoint, Pair, pattern
from tests.rdma import device
from tests.rdma.addresses import host
from tests.rdma.breakable import BreakablePair, breakable, fail_all

from allreduced.core.errors import AgentUnavailable
from allreduced.transports.rdma import verbs
from allreduced.transports.registry import transport

SIZE = 8 << 20


@pytest.fixture(autouse=True)
def mended(nothing_held: None) -> Iterator[None]:
    """Let queue pairs be breakable, and bring the device and its port back after the test."""
    with breakable():
        yield
    device.restore()


@pytest.fixture
async def link() -> AsyncIterator[Pair]:
    """Return a link on which data is under way in both directions, and each end waits for more."""
    async with Endpoint(f"rdma://{host(0)}:0", transport("rdma"), pins=True).pair() as pair:
        for near, far in ((pair.near, pair.far), (pair.far, pair.near)):
            token = far.post_receive(1, memoryview(bytearray(SIZE)))
            near.send(1, token, 0, memoryview(pattern(SIZE, 1)))
            far.post_receive(2, memoryview(bytearray(SIZE)))
        await pair.far_events.until(lambda: bool(pair.far_events.pieces))
        await pair.near_events.until(lambda: bool(pair.near_events.pieces))
        yield pair


async def reasons(link: Pair) -> list[str]:
    """Return why both ends are over, once they are, with all memory given back."""
    said = []
    for events in (link.near_events, link.far_events):
        await events.until_closed()
        (error,) = events.ends
        assert isinstance(error, AgentUnavailable)
        assert events.sent_sends == [1]
        assert sorted(events.cancelled) in ([2], [1, 2])  # the data may have been faster
        assert events.order[-1] == "closed"
        said.append(error.message)
    return said


async def test_queue_pairs_in_the_error_state_end_the_link(link: Pair) -> None:
    before = device.queue_pairs()
    assert len(before) == 4
    fail_all()
    said = await reasons(link)
    assert any("RDMA by rxe0: the queue pair failed" in text for text in said), said
    assert device.queue_pairs() == frozenset()
    async with Endpoint(f"rdma://{host(0)}:0", transport("rdma"), pins=True).pair() as again:
        assert not device.queue_pairs() & before
        target = bytearray(SIZE)
        again.near.send(1, again.far.post_receive(1, memoryview(target)), 0, memoryview(pattern(SIZE, 2)))
        await again.far_events.until_bytes(1, SIZE)
        assert target == pattern(SIZE, 2)


async def test_one_queue_pair_in_the_error_state_ends_the_link(link: Pair) -> None:
    BreakablePair.living()[0].fail()
    said = await reasons(link)
    assert any("RDMA by rxe0: " in text for text in said), said


async def test_a_port_that_goes_down_ends_the_link(link: Pair) -> None:
    device.port_down()
    said = await reasons(link)
    assert any("RDMA by rxe0: the port went down" in text for text in said), said


async def test_a_device_that_is_removed_is_let_go_of(link: Pair) -> None:
    removing = asyncio.create_task(asyncio.to_thread(device.remove))
    said = await reasons(link)
    assert any("RDMA by rxe0: the device was removed" in text for text in said), said
    await removing
    assert list(verbs.load().devices()) == []
