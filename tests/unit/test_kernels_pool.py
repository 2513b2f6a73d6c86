"""The worker threads: every job once, urgent ones first, completions through the eventfd, orderly ends."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction
from allreduced.daemon.kernels import Pool

Doubles: TypeAlias = "npt.NDArray[np.float64]"
MakePool: TypeAlias = Callable[..., Pool]

PIECE = 256 * 1024  # bytes of output that a thread takes at once
PATIENCE = 60.0  # seconds until a completion that never comes fails the test


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    pools: list[Pool] = []

    def make(threads: int = 1, cpus: tuple[int, ...] = (), nice: int = 0) -> Pool:
        pools.append(Pool(threads, cpus, nice))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    assert left_of({}) == set()


class Sum:
    """One job: the sum of ``sources`` times the same values."""

    def __init__(self, count: int, sources: int = 2) -> None:
        self.values: Doubles = np.arange(count, dtype=np.float64) % 1000
        self.target: Doubles = np.full(count, -1.0)
        self.sources = sources

    def submit(self, pool: Pool, job: int, priority: int = 0, share: int = 0) -> None:
        addresses = [self.values.ctypes.data] * self.sources
        count = self.values.size
        target = self.target.ctypes.data
        pool.submit(job, DType.FLOAT64, Reduction.SUM, 1, count, addresses, target, priority, share=share)

    @property
    def right(self) -> bool:
        return bool((self.target == self.values * self.sources).all())

    @property
    def untouched(self) -> bool:
        return bool((self.target == -1.0).all())

    def await_begin(self) -> None:
        """Return when a thread is at it: else what is submitted next may be urgent, and come first."""
        until = time.monotonic() + PATIENCE
        while self.untouched:
            assert time.monotonic() < until, "no thread took the job"
            os.sched_yield()


def readable(pool: Pool, timeout: float = 0.0) -> bool:
    return bool(select.select([pool.fileno()], [], [], timeout)[0])


def collect(pool: Pool, number: int) -> list[int]:
    """Return the next ``number`` completions, in their order."""
    jobs: list[int] = []
    while len(jobs) < number:
        assert readable(pool, PATIENCE), f"only {jobs} completed"
        jobs += pool.completed()
    return jobs


def native_threads() -> dict[int, Path]:
    """Return the reducing threads of this process."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if (task / "comm").read_text().startswith("reduce-"):
                found[int(task.name)] = task
    return found


def left_of(before: dict[int, Path]) -> set[int]:
    """Return the new reducing threads. The kernel lists one for a moment after it was joined."""
    until = time.monotonic() + PATIENCE
    while (left := native_threads().keys() - before.keys()) and time.monotonic() < until:
        os.sched_yield()
    return set(left)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_jobs_complete_once_each_with_the_right_values(make_pool: MakePool, threads: int) -> None:
    pool = make_pool(threads)
    sums = [Sum(count=7 * job if job % 50 else 200_003, sources=1 + job % 9) for job in range(200)]
    for job, work in enumerate(sums):
        work.submit(pool, job, priority=job % 3)
    assert sorted(collect(pool, len(sums))) == list(range(200))
    assert pool.completed() == []
    assert all(work.right for work in sums)


@pytest.mark.parametrize("count", [PIECE // 8 - 1, PIECE // 8, PIECE // 8 + 1, 3 * PIECE // 8, 1_000_003])
def test_a_large_job_is_cut_without_gap_or_overlap(make_pool: MakePool, count: int) -> None:
    pool = make_pool(3)
    work = Sum(count)
    work.submit(pool, 5)
    assert collect(pool, 1) == [5]
    assert work.right


def test_a_job_in_place_is_right_over_pieces(make_pool: MakePool) -> None:
    pool = make_pool(2)
    values = np.arange(300_000, dtype=np.int64)
    address = values.ctypes.data
    pool.submit(1, DType.INT64, Reduction.SUM, 1, values.size, [address] * 3, address)
    assert collect(pool, 1) == [1]
    assert (values == 3 * np.arange(300_000)).all()


def test_an_empty_job_completes(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.submit(9, DType.FLOAT32, Reduction.SUM, 1, 0, [0], 0)
    assert collect(pool, 1) == [9]


def test_the_descriptor_is_readable_exactly_while_completions_wait(make_pool: MakePool) -> None:
    pool = make_pool()
    assert not readable(pool)
    assert pool.completed() == []
    for job in range(3):
        Sum(10).submit(pool, job)  # one thread: completions come in order
    jobs: list[int] = []
    while 2 not in jobs:
        assert readable(pool, PATIENCE)
        jobs += pool.completed()
    assert jobs == [0, 1, 2]
    assert not readable(pool)
    Sum(10).submit(pool, 3)
    assert readable(pool, PATIENCE)
    assert readable(pool)  # looking does not reset it
    assert pool.completed() == [3]
    assert not readable(pool)


def test_jobs_run_by_priority_then_by_order(make_pool: MakePool) -> None:
    for attempt in range(1, 6):
        pool = make_pool()
        blocker = Sum(2 * PIECE // 8, sources=1000 * attempt)
        blocker.submit(pool, 0, priority=100)
        waiting = [(1, -1), (2, 0), (3, 7), (4, 0), (5, 7)]
        works = [Sum(10) for _ in waiting]
        for work, (job, priority) in zip(works, waiting, strict=True):
            work.submit(pool, job, priority)
        all_waited = not readable(pool)  # else the machine held us up for longer than the blocker ran
        jobs = collect(pool, 6)
        if all_waited:
            assert jobs == [0, 3, 5, 2, 4, 1]
            return
    pytest.fail("the blocking job ended before the others were submitted, five times")


@pytest.mark.parametrize(
    ("first", "second", "order"),
    [
        # Each share in turn, whatever its priority and its number of jobs.
        ([1, 1, 1, 1, 1, 1], [1, 1, 1], "A B A B A B A A A"),
        ([1, 1, 1], [1, 1, 1, 1, 1, 1], "A B A B A B B B B"),
        # By bytes and not by jobs.
        ([4, 4, 4, 4, 4, 4, 4, 4], [1, 1], "A B A A A A B A A A"),
    ],
)
def test_shares_get_equal_parts_of_the_threads(
    make_pool: MakePool, first: list[int], second: list[int], order: str
) -> None:
    """``first``, ``second``: the jobs of the shares A and B, as parts of a piece; A is urgent."""
    for attempt in range(1, 6):
        pool = make_pool()
        before = [Sum(PIECE // 8) for _ in range(3)]  # that A had all threads until now is no reason to let it wait
        for job, work in enumerate(before):
            work.submit(pool, job, share=1)
        collect(pool, 3)
        blocker = Sum(PIECE // 8, sources=2000 * attempt)
        blocker.submit(pool, 0, share=9)
        blocker.await_begin()
        works = []
        for share, priority, parts in ((1, 50, first), (2, 0, second)):
            for number, part in enumerate(parts):
                works.append(Sum(PIECE // 8 // part))
                works[-1].submit(pool, 1000 * share + number, priority, share)
        all_waited = not readable(pool)  # else the machine held us up for longer than the blocker ran
        jobs = collect(pool, 1 + len(works))
        assert all(work.right for work in works)
        if all_waited:
            assert " ".join("-AB"[job // 1000] for job in jobs) == f"- {order}"
            return
    pytest.fail("the blocking job ended before the others were submitted, five times")


def test_an_urgent_job_overtakes_a_large_one_that_runs(make_pool: MakePool) -> None:
    orders = []
    for attempt in range(1, 6):
        pool = make_pool()
        large, urgent = Sum(4 * PIECE // 8, sources=500 * attempt), Sum(10)
        large.submit(pool, 1)
        urgent.submit(pool, 2, priority=1)
        orders.append(collect(pool, 2))
        assert large.right
        assert urgent.right
        if orders[-1] == [2, 1]:
            return
    pytest.fail(f"the large job always ended first: {orders}")


def test_close_finishes_what_runs_and_drops_what_waits(make_pool: MakePool) -> None:
    pool = make_pool()
    works = [Sum(2 * PIECE // 8, sources=300)] + [Sum(1000) for _ in range(50)]
    for job, work in enumerate(works):
        work.submit(pool, job)
    pool.close()
    reported = pool.completed()
    assert reported == list(range(len(reported)))
    assert [work.right for work in works] == [job in reported for job in range(len(works))]
    assert [work.untouched for work in works] == [job not in reported for job in range(len(works))]


def test_close_joins_the_threads_and_may_be_repeated(make_pool: MakePool) -> None:
    before = native_threads()
    pool = make_pool(3)
    assert pool.threads == 3
    descriptor = pool.fileno()
    assert os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventfd]"  # noqa: PTH115 # no path
    pool.close()
    pool.close()
    assert left_of(before) == set()
    assert pool.fileno() == -1
    assert pool.completed() == []
    with pytest.raises(ValueError, match="the pool is closed"):
        Sum(10).submit(pool, 1)


def test_a_forgotten_pool_ends_its_threads() -> None:
    before = native_threads()
    pool = Pool(2)
    Sum(10).submit(pool, 1)
    collect(pool, 1)
    assert len(native_threads().keys() - before.keys()) == 2
    del pool
    assert left_of(before) == set()


def test_a_process_that_forks_or_ends_with_a_pool_does_not_hang() -> None:
    script = (
        "import os, sys\n"
        "from allreduced.daemon.kernels import Pool\n"
        "pool = Pool(2)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    del pool\n"
        "    sys.exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_threads_leave_signals_to_python(make_pool: MakePool) -> None:
    make_pool(2)
    for task in native_threads().values():
        lines = (task / "status").read_text().splitlines()
        blocked = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
        for signal in (1, 2, 12, 15, 17):
            assert blocked >> (signal - 1) & 1


def test_threads_are_pinned_in_turn(make_pool: MakePool) -> None:
    allowed = sorted(os.sched_getaffinity(0))[:2]
    make_pool(3, tuple(allowed))
    pinned = [os.sched_getaffinity(tid) for tid in sorted(native_threads())]
    assert pinned == [{allowed[index % len(allowed)]} for index in range(3)]
    assert os.sched_getaffinity(0) >= set(allowed)


def test_threads_are_niced_alone(make_pool: MakePool) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    make_pool(2, nice=19)
    assert [os.getpriority(os.PRIO_PROCESS, tid) for tid in native_threads()] == [19, 19]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.parametrize(
    ("threads", "cpus", "nice", "message"),
    [
        (0, (), 0, "threads must be between 1 and 1024, got 0"),
        (-1, (), 0, "threads must be between 1 and 1024, got -1"),
        (100_000, (), 0, "threads must be between 1 and 1024, got 100000"),
        (1, (-1,), 0, "cpus must be between 0 and 1023, got -1"),
        (2, (0, 1023), 0, "cpu 1023 does not exist or may not be used"),
        (1, (), 20, "nice must be between -20 and 19, got 20"),
    ],
)
def test_bad_pools_are_refused(threads: int, cpus: tuple[int, ...], nice: int, message: str) -> None:
    before = native_threads()
    with pytest.raises(ValueError, match=message):
        Pool(threads, cpus, nice)
    assert left_of(before) == set()


def test_bad_jobs_are_refused_and_harm_nobody(make_pool: MakePool) -> None:
    pool = make_pool()
    address = np.zeros(4).ctypes.data
    with pytest.raises(ValueError, match="unknown dtype code 77"):
        pool.submit(1, 77, Reduction.SUM, 1, 4, [address], address)
    with pytest.raises(ValueError, match="reduction code 2 is not defined for dtype code 3"):
        pool.submit(2, DType.INT32, Reduction.MEAN, 1, 4, [address], address)
    with pytest.raises(TypeError, match="sources"):
        pool.submit(3, DType.INT32, Reduction.SUM, 1, 4, None, address)  # type: ignore[arg-type] # that is the test
    work = Sum(10)
    work.submit(pool, 4)
    assert collect(pool, 1) == [4]
    assert work.right
