"""What is cancelled is given back exactly once, and only when nothing touches the memory any more."""

from __future__ import annotations

import pytest
from tests.contract.conftest import Endpoint, Pair, pattern

FRAME = 16 << 10


async def _still_works(pair: Pair) -> None:
    """Use control and data once more; with that, what came before on a flow was handled."""
    for k in range(900, 904):
        target = bytearray(FRAME)
        token = pair.far.post_receive(k, memoryview(target))
        pair.near.send(k, token, 0, memoryview(pattern(FRAME, k)))
        await pair.far_events.until_bytes(k, FRAME)
        assert target == pattern(FRAME, k)
    pair.near.send_control(b"fine")
    await pair.far_events.until_control([b"fine"])


async def test_a_receive_before_any_frame(endpoint: Endpoint) -> None:
    target = bytearray(5 * FRAME)
    async with endpoint.pair(flows=1, max_frame=FRAME) as pair:
        token = pair.far.post_receive(1, memoryview(target))
        pair.far.cancel_receive(1)
        pair.far.cancel_receive(1)
        assert pair.far_events.count() == 0
        await pair.far_events.until(lambda: pair.far_events.cancelled == [1])
        pair.near.send(1, token, 0, memoryview(pattern(5 * FRAME, 1)))
        await pair.near_events.until(lambda: pair.near_events.sent_sends == [1])
        await _still_works(pair)
        assert target == bytearray(5 * FRAME)
        assert pair.far.stats.frames_unclaimed == 5
        assert pair.far_events.cancelled == [1]


@pytest.mark.parametrize("after", [1, 2, 7])
@pytest.mark.parametrize("flows", [1, 3])
async def test_a_receive_between_frames(endpoint: Endpoint, after: int, flows: int) -> None:
    frames = 60
    target = bytearray(frames * FRAME)
    kept: list[bytes] = []
    async with endpoint.pair(flows=flows, max_frame=FRAME) as pair:

        def stop(link: object, receive: int) -> None:
            if len(pair.far_events.pieces) == after:
                pair.far.cancel_receive(1)

        pair.far_events.on_received = stop
        pair.far_events.on_cancelled = lambda link, receive: kept.append(bytes(target))
        pair.near.send(1, pair.far.post_receive(1, memoryview(target)), 0, memoryview(pattern(frames * FRAME, 5)))
        await pair.far_events.until(lambda: pair.far_events.cancelled == [1])
        await pair.near_events.until(lambda: pair.near_events.sent_sends == [1])
        await pair.near.close(10)  # everything arrives before this returns
        assert bytes(target) == kept[0]
        assert pair.far_events.nbytes(1) == after * FRAME
        assert pair.far.stats.frames_unclaimed == frames - after


async def test_numbers_that_are_not_under_way(endpoint: Endpoint) -> None:
    async with endpoint.pair(max_frame=FRAME) as pair:
        pair.far.cancel_receive(77)
        pair.near.cancel_send(77)
        await _still_works(pair)
        assert pair.far_events.cancelled == []
        await pair.near_events.until(lambda: pair.near_events.sent_sends == [900, 901, 902, 903])


async def test_a_number_can_be_posted_again_after_its_cancel(endpoint: Endpoint) -> None:
    """Late frames for the cancelled posting must not land in the new one."""
    first, second = bytearray(20 * FRAME), bytearray(20 * FRAME)
    async with endpoint.pair(flows=1, max_frame=FRAME) as pair:
        tokens: list[bytes] = []

        def stop(link: object, receive: int) -> None:
            if len(pair.far_events.pieces) == 1:
                pair.far.cancel_receive(1)

        def again(link: object, receive: int) -> None:
            tokens.append(pair.far.post_receive(1, memoryview(second)))
            pair.near.send(2, tokens[0], 0, memoryview(pattern(20 * FRAME, 6)))

        pair.far_events.on_received = stop
        pair.far_events.on_cancelled = again
        pair.near.send(1, pair.far.post_receive(1, memoryview(first)), 0, memoryview(pattern(20 * FRAME, 5)))
        await pair.far_events.until_bytes(1, 21 * FRAME)
        await _still_works(pair)
        assert second == pattern(20 * FRAME, 6)
        assert pair.far.stats.frames_unclaimed == 19


async def test_a_send_before_its_first_frame(endpoint: Endpoint) -> None:
    async with endpoint.pair(max_frame=FRAME) as pair:
        token = pair.far.post_receive(1, memoryview(bytearray(5 * FRAME)))
        pair.near.send(1, token, 0, memoryview(bytes(5 * FRAME)))
        pair.near.cancel_send(1)
        pair.near.cancel_send(1)
        assert pair.near_events.count() == 0
        await pair.near_events.until(lambda: pair.near_events.sent_sends == [1])
        await _still_works(pair)
        assert pair.far_events.nbytes(1) == 0
        assert pair.near_events.sent_sends.count(1) == 1


@pytest.mark.parametrize("flows", [1, 3])
async def test_a_send_under_way_delivers_whole_true_frames_only(endpoint: Endpoint, flows: int) -> None:
    size = 24 << 20
    source, target = pattern(size, 8), bytearray(size)
    async with endpoint.pair(flows=flows, max_frame=FRAME) as pair:

        def stop(link: object, receive: int) -> None:
            pair.near.cancel_send(1)

        def overwrite(link: object, send: int) -> None:
            source[:] = bytes(size)

        pair.far_events.on_received = stop
        pair.near_events.on_sent = overwrite
        pair.near.send(1, pair.far.post_receive(1, memoryview(target)), 0, memoryview(source))
        await pair.near_events.until(lambda: pair.near_events.sent_sends == [1])
        await pair.near.close(10)  # everything arrives before this returns
        assert 0 < len(pair.far_events.pieces) < size // FRAME
        true = pattern(size, 8)
        for _, offset, nbytes, _ in pair.far_events.pieces:
            assert nbytes == FRAME
            assert target[offset : offset + nbytes] == true[offset : offset + nbytes]
        assert pair.near_events.sent_sends == [1]
