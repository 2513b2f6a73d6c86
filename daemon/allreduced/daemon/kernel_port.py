"""What the driver needs from the native kernels, and the native ones behind it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from allreduced.core.errors import AgentUnavailable, ConfigError
from allreduced.daemon.settings import Engine

MAX_THREADS = 4
"""Reduction threads where the settings do not say; memory bandwidth is used up by then."""


class Kernels(Protocol):
    """Reductions: small ones at once on the calling thread, others on worker threads.

    Addresses and counts are the caller's responsibility. The memory of a submitted job is the kernels' until
    ``completed`` returned it. A job is handed on as arguments, for the native functions take them as they are: to make
    a record of it and unpack it again costs 0.6 us, which is as much as the reduction of 4 KiB.
    """

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
        """Reduce at once. The last ``partials`` sources and the target may hold partial results: see ``_native``."""

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
        self.reduce = _native.reduce
        self.submit = self._pool.submit
        self.completed = self._pool.completed
        self.fileno = self._pool.fileno
        self.close = self._pool.close


def reduction_threads(settings: Engine) -> int:
    """Return how many threads reduce."""
    return settings.threads or min(len(settings.cpus) or len(os.sched_getaffinity(0)), MAX_THREADS)


def native_kernels(threads: int, cpus: Sequence[int], nice: int) -> NativeKernels:
    """Return the native kernels, with their threads.

    :raises AgentUnavailable: the native module was not built or does not fit this machine.
    :raises ConfigError: this process may not have such threads.
    """
    try:
        return NativeKernels(threads, cpus, nice)
    except ImportError as error:
        raise AgentUnavailable(
            f"the native kernels cannot be loaded: {error}",
            hint="where this is the wheel without them, which is for clients, install one with them, or build it where "
            "there is a C++ compiler: pip install --no-binary allreduced 'allreduced[agent]'",
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"engine: the reduction threads cannot be started: {error}",
            path="engine",
            hint=f"this process may use the CPUs {sorted(os.sched_getaffinity(0))} (engine.threads, cpus, nice)",
        ) from error
