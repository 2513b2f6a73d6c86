from collections.abc import Sequence

def instruction_set() -> str:
    """Return what the reductions run on here: "avx512", "avx2", "baseline" or "neon"."""

def reduce(
    dtype: int,
    reduction: int,
    divisor: int,
    count: int,
    sources: Sequence[int],
    target: int,
    *,
    partials: int = 0,
    partial_target: bool = False,
) -> None:
    """Reduce at once, on the calling thread, without the GIL. Addresses and counts are the caller's responsibility.

    ``sources``: addresses of ``count`` elements, at least one (copy: exactly one), combined in order. No alignment is
    needed. ``target`` is one of them, with elements of the same size, or overlaps none. ``divisor`` divides the final
    sum of mean; the others ignore it.

    The last ``partials`` of the sources, and the target if ``partial_target``, hold partial results in
    ``DType(dtype).accumulator``: float32 for the 16-bit floats, which are rounded only on the way into a target of
    their own type. For the other types this changes nothing. A copy between the two types converts.

    :raises ValueError: unknown dtype or reduction code, or the pair is not defined; no source; more than one source of
        copy; negative count; divisor < 1; address 0 with a count above 0; ``partials`` negative or more than there are
        sources; a target that is a source with elements of another size.
    :raises TypeError: an argument is not an integer, or ``sources`` not a sequence of addresses.
    """

class Pool:
    """Worker threads that run reductions; large jobs are cut over the threads.

    Thread *i* is pinned to ``cpus[i % len(cpus)]`` if there are any, and gets the nice value ``nice`` unless that is 0.
    The threads take no signals. A child after fork has no threads: it may only forget the pool.

    :raises ValueError: ``threads``, ``cpus`` or ``nice`` out of range, or a CPU that this process may not use.
    :raises OSError: a thread or descriptor could not be made, or a negative nice value is not permitted.
    """

    def __init__(self, threads: int, cpus: Sequence[int] = ..., nice: int = 0) -> None: ...
    @property
    def threads(self) -> int: ...
    def fileno(self) -> int:
        """Return the eventfd that is readable exactly while completions wait; -1 once closed.

        It is the pool's: take it out of the event loop before :meth:`close`.
        """

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
        *,
        partials: int = 0,
        partial_target: bool = False,
        share: int = 0,
    ) -> None:
        """Queue one job. The memory is the pool's until it completes.

        While several shares have jobs, each gets the same part of the threads, by the bytes that its jobs read and
        write; within a share higher priority first, then in order.

        An urgent job overtakes a running one after at most 256 KiB of output per thread. ``job`` is returned as it is;
        the pool does not look whether it is unique.

        :raises ValueError: as :func:`reduce`, or the pool is closed.
        :raises TypeError: as :func:`reduce`.
        """

    def completed(self) -> list[int]:
        """Return the jobs that completed since the last call, in order of completion, and reset the eventfd.

        Never blocks.
        """

    def close(self) -> None:
        """Finish the jobs that have begun, drop those that have not, join the threads, close the eventfd. Idempotent.

        A job was either done as a whole, and :meth:`completed` still tells, or its memory was not touched.
        """
