"""A histogram in plain numbers: cheap to fill, and read only when somebody asks."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Counts values by size. ``bounds``: ascending, the largest value of each bucket; a last one takes what is larger.

    One observation costs a search in ``bounds`` and two additions.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """How many values each bucket has, not added up."""
        self.total = 0.0
        """The sum of all values."""

    def observe(self, value: float) -> None:
        """Take note of one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def copy(self) -> Histogram:
        """Return what it holds now, which does not change any more."""
        copied = Histogram(self.bounds)
        copied.counts = self.counts.copy()
        copied.total = self.total
        return copied
