"""The verifier accepts right schedules and refuses wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tests.simulation.example_schedules import doubling, doubling_traffic, ring, ring_traffic

from allreduced.schedules.broadcast import direct_broadcast, direct_broadcast_traffic
from allreduced.schedules.direct import direct, direct_traffic
from allreduced.schedules.schedule import Move, Row, Schedule, from_rows
from allreduced.schedules.verify import ScheduleError, verify

RANGES = [range(1, 32), range(32, 48), range(48, 58), range(58, 65)]


@pytest.mark.parametrize("several", RANGES)
def test_direct_is_right(several: range) -> None:
    for members in several:
        verify(direct(members), traffic=direct_traffic)


@pytest.mark.parametrize("several", RANGES)
def test_broadcast_is_right_from_several_roots(several: range) -> None:
    for members in several:
        for root in sorted({0, members // 2, members - 1}):
            verify(
                direct_broadcast(members, root),
                contributors=[root],
                traffic=partial(_broadcast_traffic, members, root),
            )


def _broadcast_traffic(members: int, root: int, member: int, sizes: list[int]) -> int:
    return direct_broadcast_traffic(member, members, root, sizes)


@pytest.mark.parametrize("several", [range(1, 25), (32, 48), (64,)])
def test_ring_is_right(several: Sequence[int]) -> None:
    for members in several:
        verify(ring(members), traffic=ring_traffic)


@pytest.mark.parametrize("members", [2, 4, 8, 32])
def test_doubling_is_right(members: int) -> None:
    verify(doubling(members), traffic=lambda member, sizes: doubling_traffic(member, members, sizes))


def _without(schedule: Schedule, index: int) -> Schedule:
    columns = ("member", "block", "step", "move", "peer", "final")
    member, block, step, move, peer, final = (np.delete(getattr(schedule, name), index) for name in columns)
    return Schedule(schedule.algorithm, schedule.members, schedule.blocks, member, block, step, move, peer, final)


@pytest.mark.parametrize("schedule", [direct(3), ring(3), doubling(4)], ids=lambda schedule: schedule.algorithm)
def test_a_schedule_with_a_row_missing_is_refused(schedule: Schedule) -> None:
    for index in range(len(schedule.member)):
        with pytest.raises(ScheduleError):
            verify(_without(schedule, index), traffic=_any_traffic)


@pytest.mark.parametrize("schedule", [direct(4), ring(4)], ids=lambda schedule: schedule.algorithm)
@pytest.mark.parametrize("column", ["block", "step", "move", "peer", "final"])
def test_a_schedule_with_a_number_changed_is_refused(schedule: Schedule, column: str) -> None:
    sends = schedule.move == Move.SEND
    for index in range(len(schedule.member)):
        if column == "final" and sends[index]:
            continue  # has no meaning there
        values = getattr(schedule, column).copy()
        values[index] = (values[index] + 1) % 3 if column == "move" else 1 - values[index]
        if column in ("block", "step", "peer"):
            values[index] = (getattr(schedule, column)[index] + 1) % 4
        with pytest.raises(ScheduleError):
            verify(replace(schedule, **{column: values}), traffic=_any_traffic)


def test_contributions_that_come_twice_are_refused() -> None:
    rows = [Row(0, 0, 0, Move.SEND, 1, False), Row(1, 0, 0, Move.RECV_REDUCE, 0, False)]
    rows += [Row(0, 0, 1, Move.SEND, 1, False), Row(1, 0, 1, Move.RECV_REDUCE, 0, True)]
    with pytest.raises(ScheduleError, match="adds a contribution twice"):
        verify(from_rows("twice", 2, 1, rows), traffic=_any_traffic)


def test_a_circle_of_waiting_members_is_refused() -> None:
    rows = []
    for member in range(2):
        rows.append(Row(member, 0, 1, Move.SEND, 1 - member, False))
        rows.append(Row(member, 0, 0, Move.RECV_REDUCE, 1 - member, False))
    shifted = [row._replace(step=0) if row.member == 1 else row for row in rows]
    with pytest.raises(ScheduleError):
        verify(from_rows("circle", 2, 1, shifted), traffic=_any_traffic)


def test_a_final_value_must_not_overtake_what_it_replaces() -> None:
    rows = [
        Row(0, 0, 0, Move.SEND, 1, False),
        Row(0, 0, 0, Move.SEND, 2, False),
        Row(1, 0, 0, Move.RECV_REDUCE, 0, False),
        Row(2, 0, 0, Move.RECV_REDUCE, 0, False),
        Row(1, 0, 1, Move.SEND, 2, False),
        Row(1, 0, 2, Move.RECV_COPY, 2, True),
    ]
    with pytest.raises(ScheduleError):
        verify(from_rows("overtake", 3, 1, rows), traffic=_any_traffic)


def test_other_traffic_than_the_formula_is_refused() -> None:
    with pytest.raises(ScheduleError, match="the formula says"):
        verify(direct(3), traffic=lambda member, sizes: 2 * sum(sizes))


def _any_traffic(member: int, sizes: object) -> int:
    del member, sizes
    raise AssertionError("a wrong schedule got as far as the traffic")
