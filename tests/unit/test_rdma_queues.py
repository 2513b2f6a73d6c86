"""The queues of RDMA links: never overrun, in chains, and what a full one means."""

from __future__ import annotations

import pytest
from tests.contract.conftest import pattern
from tests.support.fake_verbs import FakeFabric
from tests.support.rdma_rig import options, rig, turns

from allreduced.transports.rdma.endpoint import SEND_DEPTH
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.verbs_port import SendKind

FRAME = 64 << 10


async def test_many_small_frames_never_overrun_a_queue() -> None:
    count = 3000
    fabric = FakeFabric()
    few = RdmaOptions(depth=8)
    async with rig(fabric, near=options("a", 1, rdma=few), far=options("b", 2, rdma=few)) as link:
        targets = [bytearray(100) for _ in range(count)]
        for k, target in enumerate(targets):
            link.near.send(k, link.far.post_receive(k, memoryview(target)), 0, memoryview(pattern(100, k)))
        await link.far_events.until(lambda: len(link.far_events.pieces) == count)
        assert all(target == pattern(100, k) for k, target in enumerate(targets))
        assert fabric.receive_queue_low >= 0
        assert fabric.most_queued <= SEND_DEPTH


async def test_a_peer_that_does_not_run_is_sent_no_more_than_it_has_receive_requests_for() -> None:
    few = RdmaOptions(depth=8)
    async with rig(near=options("a", 1, rdma=few), far=options("b", 2, rdma=few)) as link:
        targets = [bytearray(100) for _ in range(50)]
        tokens = [link.far.post_receive(k, memoryview(target)) for k, target in enumerate(targets)]
        pair = link.near_pairs[0]
        before = sum(map(len, pair.chains))
        link.far_pairs[0].receives.stall(stalled=True)
        for k, token in enumerate(tokens):
            link.near.send(k, token, 0, memoryview(pattern(100, k)))
        await turns(500)
        assert 4 <= sum(map(len, pair.chains)) - before < 8  # some are kept back: an announcement goes with a write
        assert link.near_events.ends == link.far_events.ends == []
        link.far_pairs[0].receives.stall(stalled=False)
        await link.far_events.until(lambda: len(link.far_events.pieces) == 50)
        assert all(target == pattern(100, k) for k, target in enumerate(targets))


async def test_messages_are_posted_in_chains_inline_where_they_are_small_and_with_one_completion_a_chain() -> None:
    count = 200
    async with rig() as link:
        pair = link.near_pairs[0]
        before = len(pair.chains)
        for k in range(count):
            size = 10 if k % 2 else 1000
            link.near.send(k, link.far.post_receive(k, memoryview(bytearray(size))), 0, memoryview(pattern(size, k)))
        await link.far_events.until(lambda: len(link.far_events.pieces) == count)
        chains = pair.chains[before:]
        assert sum(map(len, chains)) == count
        assert 2 < max(map(len, chains)) <= 16
        for chain in chains:
            assert [request.signalled for request in chain] == [False] * (len(chain) - 1) + [True]
        sent = [request for chain in chains for request in chain]
        assert all(request.kind is SendKind.SEND for request in sent)
        assert [request.inline for request in sent] == [request.length <= pair.max_inline for request in sent]
        assert {request.inline for request in sent} == {True, False}


@pytest.mark.parametrize("end", ["near", "far"])
async def test_a_queue_that_takes_nothing_any_more_ends_the_link(end: str) -> None:
    async with rig() as link:
        pair = link.near_pairs[0] if end == "near" else link.far_pairs[0]
        pair.refuses = True
        for k in range(3):
            link.near.send(k, link.far.post_receive(k, memoryview(bytearray(10))), 0, memoryview(pattern(10, k)))
        await link.until_closed()
        kind, events = ("send", link.near_events) if end == "near" else ("receive", link.far_events)
        assert f"cannot post a {kind} request: Cannot allocate memory" in link.reason(events)


async def test_a_large_and_many_small_sends_share_a_queue_that_is_full() -> None:
    fabric = FakeFabric()
    few = RdmaOptions(depth=8)
    big = bytearray(40 * FRAME)
    async with rig(fabric, near=options("a", 1, rdma=few), far=options("b", 2, rdma=few)) as link:
        small = [bytearray(10) for _ in range(500)]
        link.near.send(9999, link.far.post_receive(9999, memoryview(big)), 0, memoryview(pattern(len(big), 7)))
        for k, target in enumerate(small):
            link.near.send(k, link.far.post_receive(k, memoryview(target)), 0, memoryview(pattern(10, k)), share=1)
        await link.far_events.until(lambda: len(link.far_events.pieces) == 540)
        assert big == pattern(len(big), 7)
        assert all(target == pattern(10, k) for k, target in enumerate(small))
