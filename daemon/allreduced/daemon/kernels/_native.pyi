from collections.abc import Sequence

def instruction_set() -> str:
    """Return what the reductions run on here: "avx512", "avx2", "baseline" or "neon"."""

def reduce(dtype: int, reduction: int, divisor: int, count: int, sources: Sequence[int], target: int) -> None:
    """Reduce at once, on the calling thread, without the GIL. Addresses and counts are the caller's responsibility.

    ``sources``: addresses of ``count`` elements, at least one, combined in order.
    ``target`` is one of them or overlaps none.
    :raises ValueError: unknown dtype or reduction code, no source, negative count, divisor < 1.
    """

class Pool:
    """Worker threads that run reductions; large jobs are cut over the threads."""

    def __init__(self, threads: int, cpus: Sequence[int] = ..., nice: int = 0) -> None: ...
    @property
    def threads(self) -> int: ...
    def fileno(self) -> int:
        """Return the eventfd that is readable while completions wait."""

    def submit(
        self,
        job: int,
        dtype: int,
        reduction: int,
        divisor: int,
        count: int,
        sources: Sequence[int],
        target: int,
        priority: int = 0,
    ) -> None:
        """Queue one job; higher priority first, then in order. The memory is the pool's until it completes."""

    def completed(self) -> list[int]:
        """Return the jobs that completed since the last call and reset the eventfd. Never blocks."""

    def close(self) -> None:
        """Finish what runs, drop what waits, join the threads. Idempotent."""
