"""The verifier accepts right schedules and refuses wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tests.simulation.example_schedules import doubling, doubling_traffic

from allreduced.schedules.broadcast import (
    chain_broadcast,
    chain_broadcast_traffic,
    direct_broadcast,
    direct_broadcast_traffic,
)
from allreduced.schedules.direct import canonical, direct, direct_traffic
from allreduced.schedules.ring import ring, ring_traffic
from allreduced.schedules.schedule import Move, Row, Schedule, Traffic, from_rows
from allreduced.schedules.select import ALGORITHMS
from allreduced.schedules.verify import ScheduleError, verify

ALL = [range(1, 32), range(32, 48), range(48, 58), range(58, 65)]
SOME = [(*range(1, 13), 17), (32, 33), (63, 64)]
WINDOWS = [(2, 1), (5, 2), (5, 4)]
"""Tiles of a block, and of a window."""
ALL_REDUCE = {
    "direct": (direct, direct_traffic),
    "canonical": (canonical, direct_traffic),
    "ring": (ring, ring_traffic),
}
BROADCAST = {
    "direct": (direct_broadcast, direct_broadcast_traffic),
    "chain": (chain_broadcast, chain_broadcast_traffic),
}


def test_every_algorithm_is_verified_here() -> None:
    assert {*ALGORITHMS["all_reduce"], *ALGORITHMS["all_reduce_many"]} == set(ALL_REDUCE)
    assert set(ALGORITHMS["broadcast"]) == set(BROADCAST)
    assert ALGORITHMS["barrier"] == ("direct",)


@pytest.mark.parametrize("several", ALL)
@pytest.mark.parametrize("algorithm", ["canonical", "ring"])  # the rows of direct are those of canonical
def test_an_all_reduce_is_right_for_every_number_of_members(algorithm: str, several: range) -> None:
    schedule, traffic = ALL_REDUCE[algorithm]
    for members in several:
        verify(schedule(members), traffic=traffic)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("tiles", "window"), WINDOWS)
@pytest.mark.parametrize("several", SOME)
def test_a_ring_is_right_with_every_window(several: Sequence[int], tiles: int, window: int, wide: bool) -> None:
    for members in several:
        verify(ring(members), traffic=ring_traffic, tiles=tiles, window=window, wide=wide)


@pytest.mark.parametrize("algorithm", ["direct", "canonical"])
@pytest.mark.parametrize(("tiles", "window"), WINDOWS)
def test_a_direct_all_reduce_is_right_with_every_window(algorithm: str, tiles: int, window: int) -> None:
    schedule, traffic = ALL_REDUCE[algorithm]
    for members in (1, 2, 3, 8, 33):
        assert np.array_equal(schedule(members).peer, direct(members).peer)
        verify(schedule(members), traffic=traffic, tiles=tiles, window=window)


@pytest.mark.parametrize("several", [range(1, 32), range(32, 65)])
@pytest.mark.parametrize("algorithm", BROADCAST)
def test_a_broadcast_is_right_from_several_roots(algorithm: str, several: range) -> None:
    schedule, traffic = BROADCAST[algorithm]
    for members in several:
        for root in sorted({0, members // 2, members - 1}):
            verify(
                schedule(members, root),
                contributors=[root],
                traffic=partial(_broadcast_traffic, traffic, members, root),
            )


def _broadcast_traffic(
    traffic: Callable[[int, int, int, Sequence[int]], Traffic],
    members: int,
    root: int,
    member: int,
    sizes: Sequence[int],
) -> Traffic:
    return traffic(member, members, root, sizes)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("tiles", "window"), WINDOWS)
@pytest.mark.parametrize("members", [2, 4, 8, 32])
def test_doubling_is_right(members: int, tiles: int, window: int, wide: bool) -> None:
    def traffic(member: int, sizes: Sequence[int]) -> Traffic:
        return doubling_traffic(member, members, sizes)

    verify(doubling(members), traffic=traffic, tiles=tiles, window=window, wide=wide)


@pytest.mark.parametrize("members", [1, 2, 3, 5, 64])
def test_bytes_are_those_of_the_documentation(members: int) -> None:
    share = 64
    sizes = [share] * members
    for member in range(members):
        assert direct_traffic(member, sizes).nbytes(4, 4) == 4 * 2 * (members - 1) * share
        assert direct_traffic(member, sizes).nbytes(2, 2) == 2 * 2 * (members - 1) * share
        assert ring_traffic(member, sizes).nbytes(4, 4) == 4 * 2 * (members - 1) * share
        assert ring_traffic(member, sizes).nbytes(4, 2) == (4 + 2) * (members - 1) * share


def _without(schedule: Schedule, index: int) -> Schedule:
    columns = ("member", "block", "step", "move", "peer", "final")
    member, block, step, move, peer, final = (np.delete(getattr(schedule, name), index) for name in columns)
    return replace(schedule, member=member, block=block, step=step, move=move, peer=peer, final=final)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    "schedule", [direct(3), canonical(3), ring(3), doubling(4)], ids=lambda schedule: schedule.algorithm
)
def test_a_schedule_with_a_row_missing_is_refused(schedule: Schedule, wide: bool) -> None:
    for index in range(len(schedule.member)):
        with pytest.raises(ScheduleError):
            verify(_without(schedule, index), traffic=_any_traffic, wide=wide)


def test_a_chain_with_a_row_missing_or_changed_is_refused() -> None:
    chain = chain_broadcast(4, 2)
    for index in range(len(chain.member)):
        with pytest.raises(ScheduleError):
            verify(_without(chain, index), contributors=[2], traffic=_any_traffic)
        for column in ("member", "step", "peer"):
            values = getattr(chain, column).copy()
            values[index] = (values[index] + 1) % 4
            with pytest.raises(ScheduleError):
                verify(replace(chain, **{column: values}), contributors=[2], traffic=_any_traffic)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("schedule", [direct(4), canonical(4), ring(4)], ids=lambda schedule: schedule.algorithm)
@pytest.mark.parametrize("column", ["block", "step", "move", "peer", "final"])
def test_a_schedule_with_a_number_changed_is_refused(schedule: Schedule, column: str, wide: bool) -> None:
    sends = schedule.move == Move.SEND
    for index in range(len(schedule.member)):
        if column == "final" and sends[index]:
            continue  # has no meaning there
        values = getattr(schedule, column).copy()
        values[index] = (values[index] + 1) % 3 if column == "move" else 1 - values[index]
        if column in ("block", "step", "peer"):
            values[index] = (getattr(schedule, column)[index] + 1) % 4
        with pytest.raises(ScheduleError):
            verify(replace(schedule, **{column: values}), traffic=_any_traffic, wide=wide)


def test_an_order_that_is_not_by_member_is_refused() -> None:
    verify(replace(direct(5), by_member=True), traffic=direct_traffic)
    for schedule in (ring(3), doubling(4)):
        with pytest.raises(ScheduleError, match="does not reduce member by member"):
            verify(replace(schedule, by_member=True), traffic=_any_traffic)


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
        verify(direct(3), traffic=lambda member, sizes: Traffic(sum(sizes), sum(sizes)))
    with pytest.raises(ScheduleError, match="the formula says"):
        verify(ring(3), traffic=direct_traffic)  # as many elements for equal blocks, but these are not


def _any_traffic(member: int, sizes: object) -> Traffic:
    del member, sizes
    raise AssertionError("a wrong schedule got as far as the traffic")
