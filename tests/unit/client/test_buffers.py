from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from allreduced.client.buffers import (
    IDLE_CALLS,
    KEEP_FREE,
    MIN_ARENA,
    MIN_BLOCK,
    Block,
    Lease,
    Mapping,
    Pool,
    block_class,
)
from allreduced.core.errors import ProtocolError


def mapping(arena: int, nbytes: int, *, writable: bool = True) -> Mapping:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, nbytes)
    return Mapping(arena, descriptor, nbytes, writable=writable)


def allocate(pool: Pool, nbytes: int) -> Block:
    block = pool.allocate(nbytes)
    assert block is not None
    return block


@pytest.mark.parametrize("nbytes", [1, 1024, 1025, 1280, 1281, 4095, 4097, 1 << 20, (1 << 20) + 1, 65 << 20, 5 << 30])
def test_a_block_wastes_at_most_a_quarter(nbytes: int) -> None:
    size = block_class(nbytes)
    assert nbytes <= size
    assert size <= max(MIN_BLOCK, 1.25 * nbytes)
    assert size % 256 == 0
    assert block_class(size) == size


def test_blocks_do_not_overlap_and_are_used_again() -> None:
    pool = Pool()
    assert pool.allocate(5000) is None
    assert pool.wanted(5000) == MIN_ARENA
    pool.add(mapping(1, MIN_ARENA))
    blocks = [allocate(pool, 5000) for _ in range(20)]
    starts = sorted(block.offset for block in blocks)
    assert all(b - a >= 5000 for a, b in itertools.pairwise(starts))
    offset = blocks[7].offset
    del blocks[7]
    assert allocate(pool, 5000).offset == offset


def test_an_arena_without_blocks_is_whole_again() -> None:
    pool = Pool()
    pool.add(mapping(1, MIN_ARENA))
    small = [allocate(pool, 1000) for _ in range(4096)]
    assert pool.allocate(1000) is None
    del small
    assert pool.allocate(MIN_ARENA) is not None


def test_surplus_arenas_are_given_back_but_never_those_in_use() -> None:
    pool = Pool()
    pool.add(mapping(1, MIN_ARENA))
    used = allocate(pool, 100)
    pool.add(mapping(2, MIN_ARENA))
    pool.add(mapping(3, MIN_ARENA))
    assert pool.surplus(MIN_ARENA) == [3]
    assert pool.surplus(0) == [2]
    assert pool.surplus(0) == []
    del used
    assert pool.surplus(0) == [1]
    assert pool.allocate(1) is None


def test_an_arena_that_is_of_no_use_for_long_is_given_back() -> None:
    pool = Pool()
    pool.add(mapping(1, KEEP_FREE + 4096))
    allocate(pool, KEEP_FREE)
    assert [pool.count_call() for _ in range(IDLE_CALLS)] == [[]] * (IDLE_CALLS - 1) + [[1]]
    pool.add(mapping(2, KEEP_FREE + 4096))
    allocate(pool, 1000)
    assert not any(pool.count_call() for _ in range(IDLE_CALLS - 1))
    allocate(pool, 1000)
    assert not any(pool.count_call() for _ in range(IDLE_CALLS))


def test_a_block_of_an_arena_that_was_given_back_is_forgotten() -> None:
    pool = Pool()
    pool.add(mapping(1, MIN_ARENA))
    block = allocate(pool, 100)
    array = block.array((25,), "float32")
    pool.clear()
    del block
    array[:] = 1
    del array
    pool.add(mapping(1, MIN_ARENA))
    assert allocate(pool, 100).offset == 0


def test_arrays_refer_to_their_stretch() -> None:
    released: list[int] = []
    lease = Lease(mapping(4, 8192, writable=False), 256, 4096, 9, released.append)
    array = lease.array((10, 2), "int32", skip=8)
    del lease
    view = np.asarray(memoryview(array[3:].data))
    del array
    assert released == []
    assert not view.flags.writeable
    assert list(view.shape) == [7, 2]
    del view
    assert released == [9]


def test_memory_that_is_too_short_is_refused_and_closed() -> None:
    descriptor = os.memfd_create("test")
    with pytest.raises(ProtocolError, match="shorter"):
        Mapping(1, descriptor, 4096, writable=True)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_a_pool_finds_what_lies_in_its_arenas() -> None:
    pool = Pool()
    arena = mapping(1, MIN_ARENA)
    pool.add(arena)
    block = allocate(pool, 400)
    array = block.array((100,), "float32")
    assert pool.find(array.ctypes.data, 400) is arena
    assert pool.find(array.ctypes.data + MIN_ARENA - 1, 2) is None
    assert pool.find(np.zeros(3).ctypes.data, 24) is None
