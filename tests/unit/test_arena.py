"""Arenas: sealed, numbered, charged, and gone when nobody uses them."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import gc
import mmap
import os
import resource
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from allreduced.core.errors import AllReducedError, InvalidArgument, LimitExceeded
from allreduced.daemon.arena import Arena, ArenaKind
from allreduced.daemon.arena_table import ArenaLimits, ArenaTable
from allreduced.daemon.engine.region import FIRST_ENGINE_BUFFER, Region
from allreduced.daemon.memory_share import available_memory, default_total, usable_memory
from allreduced.daemon.slab import SLAB_BUFFER, Slab

PAGE = mmap.PAGESIZE
LIMITS = ArenaLimits(total=100 * PAGE, inputs=80 * PAGE, per_client=50 * PAGE, per_client_arenas=4)


@pytest.fixture
async def table() -> AsyncIterator[ArenaTable]:
    table = ArenaTable(LIMITS)
    yield table
    await table.close()


class Made:
    """Waits for buffers to be made."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, AllReducedError | None]] = asyncio.Queue()

    def __call__(self, buffer: int, error: AllReducedError | None) -> None:
        self._queue.put_nowait((buffer, error))

    async def next(self) -> tuple[int, AllReducedError | None]:
        return await asyncio.wait_for(self._queue.get(), 10)

    @property
    def empty(self) -> bool:
        return self._queue.empty()


@pytest.mark.parametrize("kind", ArenaKind)
@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 3 * PAGE])
def test_address_and_view_are_the_same_memory(kind: ArenaKind, nbytes: int) -> None:
    arena = Arena.create(kind, nbytes)
    arena.view[nbytes - 1] = 7
    assert ctypes.string_at(arena.address, nbytes) == bytes(nbytes - 1) + b"\7"
    arena.close()
    arena.close()


@pytest.mark.parametrize("kind", [ArenaKind.INPUT, ArenaKind.RESULT])
def test_a_shared_arena_cannot_change_its_size_or_its_seals(kind: ArenaKind) -> None:
    arena = Arena.create(kind, PAGE)
    assert arena.descriptor is not None
    for size in (0, 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(arena.descriptor)
    arena.close()


def test_clients_write_inputs_and_only_read_results() -> None:
    given = Arena.create(ArenaKind.INPUT, PAGE)
    assert given.descriptor is not None
    with mmap.mmap(given.descriptor, PAGE) as theirs:
        theirs[:3] = b"abc"
        assert bytes(given.view[:3]) == b"abc"
    result = Arena.create(ArenaKind.RESULT, PAGE)
    assert result.descriptor is not None
    with pytest.raises(PermissionError):
        mmap.mmap(result.descriptor, PAGE)
    with pytest.raises(PermissionError):
        os.pwrite(result.descriptor, b"x", 0)
    with mmap.mmap(result.descriptor, PAGE, prot=mmap.PROT_READ) as theirs:
        result.view[:3] = b"xyz"
        assert theirs[:3] == b"xyz"
    given.close()
    result.close()


def test_a_view_that_is_still_held_outlives_close() -> None:
    arena = Arena.create(ArenaKind.INPUT, PAGE)
    view = arena.view[:4]
    arena.close()
    assert bytes(view) == bytes(4)
    del arena, view
    gc.collect()


def test_memory_that_cannot_be_had_is_a_limit_and_leaves_no_descriptor() -> None:
    with pytest.raises(LimitExceeded, match="bytes are available on this machine") as caught:
        Arena.create(ArenaKind.INPUT, 1 << 62)
    assert caught.value.limit == "memory"
    with pytest.raises(ValueError, match="at least one byte"):
        Arena.create(ArenaKind.PRIVATE, 0)


def test_too_many_open_files_are_told_as_such() -> None:
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as last:  # noqa: PTH123 # its number is what counts
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), most))
        try:
            with pytest.raises(LimitExceeded, match="Too many open files") as caught:
                Arena.create(ArenaKind.RESULT, 4096)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    assert caught.value.limit == "descriptors"
    assert "ulimit -n" in caught.value.hint


async def test_inputs_are_numbered_from_one_and_owned_by_their_client(table: ArenaTable) -> None:
    made = Made()
    assert table.create_input(7, PAGE, made) == 1
    assert not table.owns(7, 1)  # not there yet
    assert await made.next() == (1, None)
    assert table.owns(7, 1)
    assert not table.owns(8, 1)
    assert table.nbytes(1) == PAGE
    assert table.group_of(1) == 0
    assert table.create_input(8, PAGE, made) == 2
    await made.next()
    assert (table.client_bytes(7), table.total_bytes) == (PAGE, 2 * PAGE)


async def test_regions_are_found_within_bounds_only(table: ArenaTable) -> None:
    made = Made()
    table.create(FIRST_ENGINE_BUFFER, 5, PAGE, made)
    assert await made.next() == (FIRST_ENGINE_BUFFER, None)
    base = table.address(Region(FIRST_ENGINE_BUFFER, 0, PAGE))
    assert table.address(Region(FIRST_ENGINE_BUFFER, 8, PAGE - 8)) == base + 8
    assert table.address(Region(FIRST_ENGINE_BUFFER, PAGE, 0)) == base + PAGE
    with table.view(Region(FIRST_ENGINE_BUFFER, 4, 4)) as view:
        view[:] = b"abcd"
    assert ctypes.string_at(base + 4, 4) == b"abcd"
    for bad in (
        Region(FIRST_ENGINE_BUFFER, 1, PAGE),
        Region(FIRST_ENGINE_BUFFER, -1, 1),
        Region(FIRST_ENGINE_BUFFER, 0, -1),
        Region(FIRST_ENGINE_BUFFER + 1, 0, 1),
    ):
        with pytest.raises(ValueError, match="not within a mapped buffer"):
            table.address(bad)
        with pytest.raises(ValueError, match="not within a mapped buffer"):
            table.view(bad)


async def test_results_belong_to_a_group_and_private_buffers_have_no_descriptor(table: ArenaTable) -> None:
    made = Made()
    table.create(FIRST_ENGINE_BUFFER, 5, PAGE, made)
    table.create(FIRST_ENGINE_BUFFER + 1, 0, PAGE, made)
    await made.next()
    await made.next()
    assert table.group_of(FIRST_ENGINE_BUFFER) == 5
    assert table.descriptor(FIRST_ENGINE_BUFFER) > 0
    assert table.group_of(FIRST_ENGINE_BUFFER + 1) == 0
    with pytest.raises(ValueError, match="no descriptor"):
        table.descriptor(FIRST_ENGINE_BUFFER + 1)
    with pytest.raises(ValueError, match="not a new number"):
        table.create(FIRST_ENGINE_BUFFER, 5, PAGE, made)
    with pytest.raises(ValueError, match="not a new number"):
        table.create(3, 5, PAGE, made)


async def test_an_input_in_use_goes_with_its_last_use(table: ArenaTable) -> None:
    made = Made()
    buffer = table.create_input(7, PAGE, made)
    await made.next()
    table.hold(buffer)
    table.hold(buffer)
    table.drop_client(7)
    assert not table.owns(7, buffer)  # no new operation may use it
    table.unhold(buffer)
    assert table.address(Region(buffer, 0, PAGE))
    assert table.client_bytes(7) == PAGE
    table.unhold(buffer)
    with pytest.raises(ValueError, match="not within"):
        table.address(Region(buffer, 0, PAGE))
    assert table.total_bytes == 0
    table.drop(buffer)  # unknown by now: nothing happens


async def test_a_client_that_goes_while_its_arena_is_made_leaves_nothing(table: ArenaTable) -> None:
    made = Made()
    table.create_input(7, PAGE, made)
    table.drop_client(7)
    assert table.total_bytes == 0
    table.create_input(8, PAGE, made)  # made on the same thread, thus after the first
    assert await made.next() == (2, None)
    assert made.empty


async def test_limits_are_named_and_hold_for_each_client(table: ArenaTable) -> None:
    made = Made()
    with pytest.raises(LimitExceeded) as caught:
        table.create_input(7, 51 * PAGE, made)
    assert caught.value.limit == "limits.arena_bytes_per_client"
    table.create_input(7, 50 * PAGE, made)
    with pytest.raises(LimitExceeded) as caught:
        table.create_input(8, 31 * PAGE, made)
    assert caught.value.limit == "limits.arena_bytes"
    table.create_input(8, 30 * PAGE, made)
    table.create(FIRST_ENGINE_BUFFER, 1, 21 * PAGE, made)
    results = dict([await made.next() for _ in range(3)])
    refused = results[FIRST_ENGINE_BUFFER]
    assert isinstance(refused, LimitExceeded)
    assert refused.limit == "limits.arena_bytes"
    assert results[1] is None
    assert results[2] is None
    table.drop(1)
    table.create_input(7, 50 * PAGE, made)
    assert await made.next() == (3, None)


async def test_the_number_of_arenas_of_a_client_is_limited(table: ArenaTable) -> None:
    made = Made()
    for _ in range(4):
        table.create_input(7, 1, made)
        await made.next()
    with pytest.raises(LimitExceeded) as caught:
        table.create_input(7, 1, made)
    assert caught.value.limit == "limits.arenas_per_client"
    with pytest.raises(InvalidArgument, match="at least one byte"):
        table.create_input(8, 0, made)


async def test_memory_that_the_system_refuses_is_told_and_not_charged() -> None:
    table = ArenaTable(ArenaLimits.from_total(1 << 62))
    made = Made()
    table.create(FIRST_ENGINE_BUFFER, 1, 1 << 61, made)
    buffer, error = await made.next()
    assert buffer == FIRST_ENGINE_BUFFER
    assert isinstance(error, LimitExceeded)
    assert table.total_bytes == 0
    await table.close()


async def test_slots_hold_small_inputs_and_are_used_again() -> None:
    table = ArenaTable(LIMITS)
    slab = Slab(table, slot_bytes=64, slots=2, max_bytes=256)
    first, second = slab.store(b"a" * 64, 1), slab.store(b"bc", 1)
    assert first == Region(SLAB_BUFFER, 0, 64)
    assert second == Region(SLAB_BUFFER, 64, 2)
    assert ctypes.string_at(table.address(second), 2) == b"bc"
    third = slab.store(b"d", 1)  # in a further buffer
    assert third.buffer == 1
    slab.store(b"e", 2)
    with pytest.raises(LimitExceeded) as caught:
        slab.store(b"f", 3)
    assert caught.value.limit == "limits.inline_bytes"
    slab.free(second)
    with pytest.raises(KeyError):
        slab.free(second)
    assert slab.store(b"g", 1) == Region(SLAB_BUFFER, 64, 1)
    for bad in (b"", b"x" * 65):
        with pytest.raises(ValueError, match="do not go into a slot"):
            slab.store(bad, 1)
    slab.close()
    await table.close()


async def test_a_user_leaves_slots_to_others() -> None:
    table = ArenaTable(LIMITS)
    slab = Slab(table, slot_bytes=64, slots=4, max_bytes=64 * 64)

    def take_all(uid: int) -> list[Region]:
        taken = []
        with suppress(LimitExceeded):
            while True:
                taken.append(slab.store(b"x", uid))
        with pytest.raises(LimitExceeded, match=f"uid {uid} in flight take {64 * len(taken)} bytes .* of 4096"):
            slab.store(b"x", uid)
        return taken

    first, second, third = (take_all(uid) for uid in (1, 2, 3))
    assert [len(taken) for taken in (first, second, third)] == [48, 12, 3]
    for region in first[:24]:
        slab.free(region)
    fourth = take_all(4)  # what is free now is shared, too
    assert len(fourth) == 19
    for region in (*first[24:], *second, *third, *fourth):
        slab.free(region)
    slab.close()
    await table.close()


MEMINFO = "MemTotal:       16384 kB\nMemFree:        1 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"/proc/meminfo": MEMINFO}, 16 << 20),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/proc/self/cgroup": "0::/job/step\n",
                "/sys/fs/cgroup/job/step/memory.max": "max\n",
                "/sys/fs/cgroup/job/memory.max": "8388608\n",
            },
            8 << 20,
        ),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/proc/self/cgroup": "0::/../outside\n",
                "/sys/fs/cgroup/memory.max": "4194304\n",
            },
            4 << 20,
        ),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/proc/self/cgroup": "4:cpu,memory:/slurm\n0::/\n",
                "/sys/fs/cgroup/memory/slurm/memory.limit_in_bytes": "2097152\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            2 << 20,
        ),
        ({"/proc/meminfo": "no numbers here\n", "/proc/self/cgroup": "garbage\n"}, 1 << 30),
    ],
)
def test_usable_memory_is_the_lowest_limit_that_holds(files: dict[str, str], expected: int) -> None:
    assert usable_memory(files.get) == expected
    assert default_total(files.get) == expected // 2
    assert default_total(files.get, 0.25) == expected // 4


def test_this_machine_tells_its_memory() -> None:
    assert usable_memory() > 0
    assert (available_memory() or 1) > 0
    assert available_memory({"/proc/meminfo": MEMINFO}.get) is None
