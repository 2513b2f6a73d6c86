"""Free stretches of one buffer: first fit, neighbours grow together."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up so that what follows starts on a cache line."""
    return (nbytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1)


class FreeList:
    """The free bytes of a buffer of ``nbytes``, as stretches in ascending order that do not touch."""

    __slots__ = ("_ends", "_starts", "free", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.free = nbytes
        self._starts = [0] if nbytes else []
        self._ends = [nbytes] if nbytes else []

    def take(self, nbytes: int) -> int:
        """Return the offset of a stretch of ``nbytes`` (a multiple of the alignment), or -1 if none is that long."""
        starts, ends = self._starts, self._ends
        for index, start in enumerate(starts):
            rest = ends[index] - start - nbytes
            if rest >= 0:
                if rest:
                    starts[index] = start + nbytes
                else:
                    del starts[index], ends[index]
                self.free -= nbytes
                return start
        return -1

    def give(self, offset: int, nbytes: int) -> None:
        """Take back what :meth:`take` returned."""
        starts, ends = self._starts, self._ends
        end = offset + nbytes
        index = bisect_left(starts, offset)
        touches_before = index > 0 and ends[index - 1] == offset
        touches_after = index < len(starts) and starts[index] == end
        if touches_before and touches_after:
            ends[index - 1] = ends[index]
            del starts[index], ends[index]
        elif touches_before:
            ends[index - 1] = end
        elif touches_after:
            starts[index] = offset
        else:
            starts.insert(index, offset)
            ends.insert(index, end)
        self.free += nbytes
