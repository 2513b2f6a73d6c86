"""Counts reductions, and the processor time that they take."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from allreduced.core.dtypes import DType
from allreduced.daemon.kernel_port import Kernels

THREAD_NAME = "reduce-"
"""What the names of the reduction threads begin with (``pool.cpp``)."""

_NANOSECOND = 1e-9


class MeteredKernels:
    """The same kernels, and counts what goes through. Implements ``Kernels``.

    ``threads_seconds``: returns the processor time that all reduction threads of this process took so far.
    """

    def __init__(self, kernels: Kernels, threads_seconds: Callable[[], float]) -> None:
        self._kernels = kernels
        self._item_bytes = {int(dtype): dtype.itemsize for dtype in DType}
        self.threads_seconds = threads_seconds
        self.completed = kernels.completed
        self.fileno = kernels.fileno
        self.close = kernels.close
        self.loop_jobs = self.loop_bytes = 0
        """Reductions that ran at once, on the event loop, and bytes that they read."""
        self.loop_seconds = 0.0
        self.pool_jobs = self.pool_bytes = 0
        """The same of those that were given to the threads."""

    def reduce(
        self,
        dtype: int,
        reduction: int,
        divisor: int,
        count: int,
        sources: Sequence[int],
        target: int,
        *,
        partials: int,
        partial_target: bool,
    ) -> None:
        """Reduce at once. See ``Kernels``."""
        begin = perf_counter()
        self._kernels.reduce(
            dtype, reduction, divisor, count, sources, target, partials=partials, partial_target=partial_target
        )
        self.loop_seconds += perf_counter() - begin
        self.loop_jobs += 1
        self.loop_bytes += count * self._item_bytes[dtype] * len(sources)

    def submit(
        self,
        job: int,
        dtype: int,
        reduction: int,
        divisor: int,
        count: int,
        sources: Sequence[int],
        target: int,
        priority: int,
        *,
        partials: int,
        partial_target: bool,
        share: int,
    ) -> None:
        """Queue one job. See ``Kernels``."""
        self._kernels.submit(
            job,
            dtype,
            reduction,
            divisor,
            count,
            sources,
            target,
            priority,
            partials=partials,
            partial_target=partial_target,
            share=share,
        )
        self.pool_jobs += 1
        self.pool_bytes += count * self._item_bytes[dtype] * len(sources)


class ThreadClock:
    """Reads the processor time of the reduction threads of this process from ``/proc``; they are found once."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._threads: tuple[Path, ...] | None = None

    def seconds(self) -> float:
        """Return the sum; 0 where the kernel does not tell."""
        if self._threads is None:
            self._threads = self._find()
        return sum(_on_processor(thread) for thread in self._threads) * _NANOSECOND

    def _find(self) -> tuple[Path, ...]:
        found = []
        for entry in os.listdir(self._tasks):  # noqa: PTH208 # a directory of the kernel's, read at once
            thread = self._tasks / entry
            try:
                if (thread / "comm").read_text().startswith(THREAD_NAME):
                    found.append(thread)
            except OSError:  # it ended meanwhile, so it is none of those that stay
                continue
        return tuple(found)


def _on_processor(thread: Path) -> int:
    """Return the nanoseconds that a thread ran for; 0 where it ended, or the kernel keeps no account."""
    try:
        return int((thread / "schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
