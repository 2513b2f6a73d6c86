"""Which frame of which send goes next."""

from __future__ import annotations

from allreduced.transports.outbox import Outbox


def _take_all(outbox: Outbox) -> list[tuple[int, int, int]]:
    taken = []
    while (frame := outbox.take()) is not None:
        taken.append((frame.serial, frame.offset, frame.length))
        outbox.finished(frame)
    return taken


def test_priority_first_then_turns() -> None:
    outbox = Outbox(10)
    for send, (size, priority) in enumerate([(25, 0), (20, 0), (5, 9), (10, -4)]):
        assert outbox.add(send, 100 + send, 1000, memoryview(bytes(size)), 0, priority)
    assert _take_all(outbox) == [
        (102, 1000, 5),
        (100, 1000, 10),
        (101, 1000, 10),
        (100, 1010, 10),
        (101, 1010, 10),
        (100, 1020, 5),
        (103, 1000, 10),
    ]
    assert len(outbox) == 0
    assert not outbox.waiting


def test_a_send_is_over_with_its_last_frame_in_flight() -> None:
    outbox = Outbox(10)
    outbox.add(7, 1, 0, memoryview(bytes(20)), 0, 0)
    first, second = outbox.take(), outbox.take()
    assert first is not None
    assert second is not None
    assert outbox.finished(second) is None
    assert outbox.finished(first) == 7
    assert not outbox.add(7, 1, 0, memoryview(b""), 0, 0)


def test_a_cancelled_send_gives_no_more_frames() -> None:
    outbox = Outbox(10)
    outbox.add(1, 1, 0, memoryview(bytes(30)), 0, 0)
    outbox.add(2, 2, 0, memoryview(bytes(10)), 0, 0)
    frame = outbox.take()
    assert frame is not None
    outgoing = outbox.cancel(1)
    assert outgoing is frame.outgoing
    assert outbox.cancel(1) is None
    frame.outgoing = None
    assert outbox.finished(frame) is None
    assert _take_all(outbox) == [(2, 0, 10)]
    assert outbox.cancel(9) is None


def _served(outbox: Outbox, frames: int) -> dict[int, int]:
    """Take ``frames`` frames; return the bytes per share."""
    served: dict[int, int] = {}
    for _ in range(frames):
        frame = outbox.take()
        assert frame is not None
        assert frame.outgoing is not None
        served[frame.outgoing.share] = served.get(frame.outgoing.share, 0) + frame.length
        outbox.finished(frame)
    return served


def test_a_share_is_counted_in_bytes() -> None:
    outbox = Outbox(100)
    for send in range(100):
        outbox.add(send, 1, 0, memoryview(bytes(10)), 0, 5, share=1)  # many small ones that are said to be urgent
    outbox.add(100, 1, 0, memoryview(bytes(1000)), 0, 0, share=2)
    assert _served(outbox, 55) == {1: 500, 2: 500}


def test_within_a_share_priorities_and_turns_hold() -> None:
    outbox = Outbox(10)
    for send, (priority, share) in enumerate([(0, 1), (3, 1), (9, 2), (3, 1)]):
        outbox.add(send, send, 0, memoryview(bytes(20)), 0, priority, share)
    assert [serial for serial, _, _ in _take_all(outbox)] == [1, 2, 3, 2, 1, 3, 0, 0]


def test_who_sent_nothing_is_owed_nothing() -> None:
    outbox = Outbox(10)
    outbox.add(1, 1, 0, memoryview(bytes(1000)), 0, 0, share=1)
    assert _served(outbox, 50) == {1: 500}
    outbox.add(2, 2, 0, memoryview(bytes(1000)), 0, 0, share=2)
    assert _served(outbox, 20) == {1: 100, 2: 100}


def test_who_begins_again_and_again_gets_no_more_than_its_part() -> None:
    outbox = Outbox(100)
    outbox.add(0, 0, 0, memoryview(bytes(100_000)), 0, 0, share=1)
    served = {1: 0, 2: 0}
    for send in range(1, 200):
        outbox.add(send, send, 0, memoryview(bytes(100)), 0, 7, share=2)  # its queue is empty after each one
        while (frame := outbox.take()) is not None:
            assert frame.outgoing is not None
            share = frame.outgoing.share
            served[share] += frame.length
            outbox.finished(frame)
            if share == 2:
                break
    assert abs(served[1] - served[2]) <= 200


def test_shares_that_are_through_are_forgotten() -> None:
    outbox = Outbox(10)
    outbox.add(0, 0, 0, memoryview(bytes(100_000)), 0, 0, share=0)  # the link is never idle
    for share in range(1, 1000):
        outbox.add(share, share, 0, memoryview(bytes(10)), 0, 0, share)
        _served(outbox, 2)
    assert len(outbox._shares) <= 65


def test_a_cancelled_send_of_a_share_gives_its_turn_to_others() -> None:
    outbox = Outbox(10)
    outbox.add(1, 1, 0, memoryview(bytes(30)), 0, 0, share=1)
    outbox.add(2, 2, 0, memoryview(bytes(20)), 0, 0, share=2)
    outbox.cancel(1)
    assert _take_all(outbox) == [(2, 0, 10), (2, 10, 10)]
    assert not outbox.waiting
