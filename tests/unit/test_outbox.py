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
