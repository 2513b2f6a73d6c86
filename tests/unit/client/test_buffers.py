from __future__ import annotations

import errno
import itertools
import mmap
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
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
from allreduced.client.operation import Part, signature
from allreduced.client.staging import pieces
from allreduced.core.dtypes import parse_dtype
from allreduced.core.errors import LimitExceeded, ProtocolError
from allreduced.core.reductions import Reduction
from allreduced.protocol.framing import MessageReader
from allreduced.protocol.local import CHUNK, MAX_MESSAGE, ReleaseArena, Upload, decode_to_agent

if TYPE_CHECKING:
    from tests.unit.client.conftest import FakeAgent

    from allreduced.client import Communicator


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


class NoDescriptors:
    """In the place of the module mmap: this process may have no more descriptors."""

    PROT_READ, PROT_WRITE, MAP_SHARED, MAP_POPULATE = (
        mmap.PROT_READ,
        mmap.PROT_WRITE,
        mmap.MAP_SHARED,
        mmap.MAP_POPULATE,
    )

    @staticmethod
    def mmap(*_arguments: object) -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_process_without_descriptors_is_told_what_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.memfd_create("test")
    os.truncate(descriptor, 4096)
    monkeypatch.setattr("allreduced.client.buffers.mmap", NoDescriptors)
    with pytest.raises(LimitExceeded, match=r"cannot map 4096 bytes.*Too many open files .*ulimit -n"):
        Mapping(1, descriptor, 4096, writable=True)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_tensors_travel_in_messages_where_memory_cannot_be_mapped(
    agent: FakeAgent, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.hold = True
    x = np.arange(100_000.0)
    with monkeypatch.context() as patch:
        patch.setattr("allreduced.client.buffers.mmap", NoDescriptors)
        work = comm.all_reduce(x, name="x", async_op=True)
        with pytest.raises(LimitExceeded, match="Too many open files"):
            comm.empty(x.shape)
    agent.until(lambda: agent.count(Upload) == 1 and agent.count(ReleaseArena) == 2)
    agent.complete("x")
    np.testing.assert_array_equal(work.wait(), x)
    assert comm.empty(x.shape).shape == x.shape


@pytest.mark.parametrize("layout", ["C", "F", "strided", "rows"])
@pytest.mark.parametrize("dtype", ["uint8", "complex128"])
def test_pieces_are_the_elements_in_their_order(layout: str, dtype: str) -> None:
    x = np.arange(3 * 5 * 200_000).reshape(3, 5, 200_000).astype(dtype)
    given = {"C": x, "F": x.T, "strided": x[:, ::2, ::-3], "rows": x.reshape(-1, 6).T[:4]}[layout]
    told = _told(given, np.ones(3, dtype), np.ones(0, dtype))
    assert all(len(piece) <= CHUNK for piece in told)
    assert b"".join(told) == given.tobytes() + np.ones(3, dtype).tobytes()


def test_pieces_of_a_tensor_larger_than_memory_are_made_one_by_one() -> None:
    first = next(_uploads(np.broadcast_to(np.float64(1.5), (1 << 20, 1 << 30))))
    assert first == np.full(CHUNK // 8, 1.5).tobytes()


def _told(*sources: npt.NDArray[np.generic]) -> list[bytes]:
    return list(_uploads(*sources))


def _uploads(*sources: npt.NDArray[np.generic]) -> Iterator[bytes]:
    count = sum(source.size for source in sources)
    dtype = parse_dtype(sources[0].dtype.name)
    part = Part(signature("all_reduce_many", dtype, Reduction.SUM, "", count, -1), "", sources, ())
    reader = MessageReader(MAX_MESSAGE)
    for message in pieces(part):
        for body in reader.feed(message):
            upload = decode_to_agent(body)
            assert isinstance(upload, Upload)
            yield upload.data


def test_a_pool_finds_what_lies_in_its_arenas() -> None:
    pool = Pool()
    arena = mapping(1, MIN_ARENA)
    pool.add(arena)
    block = allocate(pool, 400)
    array = block.array((100,), "float32")
    assert pool.find(array.ctypes.data, 400) is arena
    assert pool.find(array.ctypes.data + MIN_ARENA - 1, 2) is None
    assert pool.find(np.zeros(3).ctypes.data, 24) is None
