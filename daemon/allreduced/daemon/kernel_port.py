"""What the driver needs from the native kernels, and the native ones behind it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class KernelJob(NamedTuple):
    """One reduction, in the order in which ``_native.reduce`` takes it: addresses, and the number of elements.

    The last ``partials`` sources, and the target if ``partial_target``, hold partial results.
    """

    dtype: int
    reduction: int
    divisor: int
    elements: int
    sources: Sequence[int]
    target: int
    partials: int = 0
    partial_target: bool = False


class Kernels(Protocol):
    """Reductions: small ones at once on the calling thread, others on worker threads.

    Addresses and counts are the caller's responsibility. The memory of a submitted job is the kernels' until
    ``completed`` returned it.
    """

    def reduce(self, job: KernelJob) -> None:
        """Reduce at once."""

    def submit(self, number: int, job: KernelJob, priority: int, share: int) -> None:
        """Queue one job. ``share``: whose it is, any number.

        Shares with jobs get equal parts of the threads; within one higher priority first, then in order.
        """

    def completed(self) -> list[int]:
        """Return the jobs that completed since the last call. Never blocks."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while completions wait."""

    def close(self) -> None:
        """Finish what runs, drop what waits, end the threads. Idempotent."""


class NativeKernels:
    """The C++ kernels, on a pool of worker threads.

    ``threads``: 0 for as many as this process may use CPUs. ``cpus``: what they are bound to; empty: unbound.

    :raises ImportError: the native module was not built or does not fit this machine.
    """

    def __init__(self, threads: int, cpus: Sequence[int] = (), nice: int = 0) -> None:
        from allreduced.daemon.kernels import _native  # here, so that the rest of the agent is tested without it

        self._pool = _native.Pool(threads or len(os.sched_getaffinity(0)), cpus, nice)
        self._reduce = _native.reduce
        self._submit = self._pool.submit
        self.completed = self._pool.completed
        self.fileno = self._pool.fileno
        self.close = self._pool.close

    def reduce(self, job: KernelJob) -> None:
        """Reduce at once. See ``Kernels``."""
        self._reduce(*job)

    def submit(self, number: int, job: KernelJob, priority: int, share: int) -> None:
        """Queue one job. See ``Kernels``."""
        dtype, reduction, divisor, elements, sources, target, partials, partial_target = job
        self._submit(
            number,
            dtype,
            reduction,
            divisor,
            elements,
            sources,
            target,
            priority,
            partials=partials,
            partial_target=partial_target,
            share=share,
        )
