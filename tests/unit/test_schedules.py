"""Block bounds, selection, and the schedules that there are."""

from __future__ import annotations

from itertools import pairwise

import pytest

from allreduced.core.errors import InvalidArgument
from allreduced.schedules.direct import direct
from allreduced.schedules.schedule import Move, block_bounds
from allreduced.schedules.select import ALGORITHMS, TABLE, schedule_for, select


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 1000, 4096, 1 << 33])
@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 64])
def test_bounds_cover_the_tensor_evenly(count: int, blocks: int) -> None:
    bounds = block_bounds(count, blocks)
    sizes = [end - start for start, end in pairwise(bounds)]
    assert len(bounds) == blocks + 1
    assert (bounds[0], bounds[-1]) == (0, count)
    assert max(sizes) - min(sizes) <= (1 if count < 64 * blocks else 127)
    assert min(sizes) >= 0


def test_direct_for_two_members_is_two_steps() -> None:
    schedule = direct(2)
    rows = list(
        zip(
            schedule.member.tolist(),
            schedule.block.tolist(),
            schedule.step.tolist(),
            [Move(move) for move in schedule.move.tolist()],
            schedule.peer.tolist(),
            schedule.final.tolist(),
            strict=True,
        )
    )
    assert rows == [
        (0, 0, 0, Move.RECV_REDUCE, 1, 1),
        (0, 0, 1, Move.SEND, 1, 0),
        (0, 1, 0, Move.SEND, 1, 0),
        (0, 1, 1, Move.RECV_COPY, 1, 1),
        (1, 0, 0, Move.SEND, 0, 0),
        (1, 0, 1, Move.RECV_COPY, 0, 1),
        (1, 1, 0, Move.RECV_REDUCE, 0, 1),
        (1, 1, 1, Move.SEND, 0, 0),
    ]


def test_one_member_has_nothing_to_exchange() -> None:
    assert len(direct(1).member) == 0
    assert direct(1).blocks == 1


MIB = 1 << 20


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_small_tensors_and_few_members_take_direct(kind: str) -> None:
    for members in range(1, 65):
        assert select(kind, "", members, 100) == "direct"
    assert select(kind, "", 2, 1 << 40) == "direct"


@pytest.mark.parametrize(
    ("kind", "members", "nbytes", "narrow", "chosen"),
    [
        ("all_reduce", 32, 64 * MIB, False, "ring"),
        ("all_reduce_many", 64, 1 << 40, False, "ring"),
        ("all_reduce", 31, 1 << 40, False, "direct"),
        ("all_reduce", 32, 64 * MIB - 1, False, "direct"),
        ("all_reduce", 64, 1 << 40, True, "direct"),
        ("broadcast", 3, 4 * MIB, False, "chain"),
        ("broadcast", 64, 1 << 40, True, "chain"),
        ("broadcast", 3, 4 * MIB - 1, False, "direct"),
    ],
)
def test_large_tensors_take_what_the_table_says(
    kind: str, members: int, nbytes: int, narrow: bool, chosen: str
) -> None:
    assert select(kind, "", members, nbytes, narrow=narrow) == chosen


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_a_wish_is_granted_whatever_the_size(kind: str) -> None:
    for algorithm in ALGORITHMS[kind]:
        for members in (1, 2, 64):
            assert select(kind, algorithm, members, 0) == algorithm
            assert select(kind, algorithm, members, 1 << 40, narrow=True) == algorithm
            schedule = schedule_for(kind, algorithm, members, 0 if kind == "broadcast" else -1)
            assert (schedule.algorithm, schedule.members) == (algorithm, members)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_what_is_chosen_is_a_known_algorithm(kind: str) -> None:
    assert {choice.algorithm for choice in TABLE[kind]} <= set(ALGORITHMS[kind])


def test_unknown_algorithms_and_kinds_name_what_there_is() -> None:
    listed = "algorithm 'magic' is not supported for all_reduce; there are direct, ring, canonical"
    with pytest.raises(InvalidArgument, match=listed):
        select("all_reduce", "magic", 2, 100)
    with pytest.raises(InvalidArgument, match="there are direct, chain"):
        select("broadcast", "ring", 2, 100)
    with pytest.raises(InvalidArgument, match="there are all_reduce, all_reduce_many, broadcast, barrier"):
        select("all_together", "", 2, 100)


def test_schedules_are_shared() -> None:
    assert schedule_for("all_reduce", "direct", 4, -1) is schedule_for("all_reduce", "direct", 4, -1)
    assert schedule_for("broadcast", "direct", 4, 1) is not schedule_for("broadcast", "direct", 4, 2)
