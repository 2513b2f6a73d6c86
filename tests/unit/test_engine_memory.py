"""Arenas of the engine: made, cut up, reused and dropped within the limits."""

from __future__ import annotations

import random

from allreduced.daemon.engine.actions import CreateArena, DestroyArena
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.free_list import FreeList
from allreduced.daemon.engine.limits import Limits
from allreduced.daemon.engine.memory import Allocation, Memory
from allreduced.daemon.engine.region import FIRST_ENGINE_BUFFER, Region

KIB = 1024


def test_free_stretches_grow_together_again() -> None:
    space = FreeList(640)
    offsets = [space.take(64) for _ in range(10)]
    assert offsets == list(range(0, 640, 64))
    assert space.take(64) == -1
    for offset in (128, 0, 64, 512, 576):
        space.give(offset, 64)
    assert space.free == 320
    assert space.take(192) == 0
    assert space.take(192) == -1
    assert space.take(128) == 512


def test_free_list_never_gives_a_byte_twice() -> None:
    rng = random.Random(1)
    space = FreeList(64 * 200)
    taken: dict[int, int] = {}
    for _ in range(3000):
        if taken and rng.random() < 0.5:
            offset = rng.choice(list(taken))
            space.give(offset, taken.pop(offset))
            continue
        nbytes = 64 * rng.randint(1, 12)
        offset = space.take(nbytes)
        if offset >= 0:
            assert all(offset + nbytes <= start or start + size <= offset for start, size in taken.items())
            taken[offset] = nbytes
    for offset, nbytes in taken.items():
        space.give(offset, nbytes)
    assert space.take(64 * 200) == 0


def _memory(**limits: int) -> tuple[Context, Memory]:
    context = Context("n", Limits(**limits))
    return context, Memory(context)


def _both(reserved: tuple[Allocation | None, Allocation | None] | None) -> tuple[Allocation, Allocation]:
    assert reserved is not None
    large, small = reserved
    assert large is not None
    assert small is not None
    return large, small


def test_arenas_are_powers_of_two_and_reused() -> None:
    context, memory = _memory(arena_bytes=64 << 20, arena_chunk=1 << 20)
    large, small = _both(memory.reserve(7, 3 << 20, 1000))
    assert context.out == [
        CreateArena(FIRST_ENGINE_BUFFER, 0, 1 << 20),
        CreateArena(FIRST_ENGINE_BUFFER + 1, 7, 4 << 20),
    ]
    assert large.region(64, 10) == Region(FIRST_ENGINE_BUFFER + 1, 64, 10)
    assert small.nbytes == 1024
    memory.release(large)
    memory.release(small)
    context.out = []
    assert memory.reserve(7, 4 << 20, 1 << 20) is not None
    assert context.out == []


def test_large_arenas_are_no_larger_than_needed() -> None:
    context, memory = _memory(arena_bytes=64 << 30)
    memory.reserve(7, (4 << 30) + 64, 0)
    assert context.out == [CreateArena(FIRST_ENGINE_BUFFER, 7, (4 << 30) + 4096)]


def test_groups_never_share_a_result_arena() -> None:
    context, memory = _memory(arena_bytes=64 << 20)
    memory.reserve(1, 9000, 0)
    memory.reserve(2, 9000, 0)
    assert [(action.group, action.nbytes) for action in context.out if isinstance(action, CreateArena)] == [
        (1, 1 << 20),
        (2, 1 << 20),
    ]


def test_nothing_is_made_where_not_everything_fits() -> None:
    context, memory = _memory(arena_bytes=64 * KIB, scratch_bytes=8 * KIB, arena_chunk=4096)
    assert memory.reserve(1, 60 * KIB, 8 * KIB) is None
    assert memory.reserve(1, 4 * KIB, 9 * KIB) is None
    assert context.out == []
    assert memory.reserved == 0
    assert memory.never_fits(56 * KIB, 8 * KIB) is None
    assert memory.never_fits(57 * KIB, 8 * KIB) == ("limits.arena_bytes", 64 * KIB)
    assert memory.never_fits(0, 9 * KIB) == ("limits.arena_bytes", 64 * KIB)


def test_idle_arenas_make_room_for_others() -> None:
    context, memory = _memory(arena_bytes=64 * KIB, scratch_bytes=64 * KIB, arena_chunk=4096)
    large, small = _both(memory.reserve(1, 32 * KIB, 16 * KIB))
    memory.arena_ready(large.arena.buffer)
    memory.arena_ready(small.arena.buffer)
    assert memory.reserve(2, 32 * KIB, 0) is None
    memory.release(large)
    context.out = []
    assert memory.reserve(2, 40 * KIB, 0) is not None
    assert context.out == [
        DestroyArena(large.arena.buffer),
        CreateArena(FIRST_ENGINE_BUFFER + 2, 2, 40 * KIB),
    ]


def test_a_forgotten_group_keeps_what_is_still_read() -> None:
    context, memory = _memory()
    one, _ = _both(memory.reserve(1, 9000, 64))
    memory.arena_ready(one.arena.buffer)
    context.out = []
    memory.forget(1)
    assert context.out == []
    memory.release(one)
    assert context.out == [DestroyArena(one.arena.buffer)]
