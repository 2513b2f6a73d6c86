"""Who is late: how long after the first sign of an operation on this node its local ranks called it."""

from __future__ import annotations

from allreduced.daemon.histogram import Histogram

BOUNDS = (1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds up to which each bucket of the skew goes."""


class Lateness:
    """Of one group on this node.

    The first sign of an operation is the call of a local rank, or the word of another node that all its ranks have
    called. So the agent of a late rank knows of it without a common clock, and without a message for it.
    """

    __slots__ = ("calls", "seconds", "skew")

    def __init__(self, ranks: int) -> None:
        """``ranks``: how many of the group are local; lists are by their place."""
        self.calls = [0] * ranks
        self.seconds = [0.0] * ranks
        self.skew = Histogram(BOUNDS)
        """Of each operation: how late the last local rank was."""

    def called(self, place: int, seconds: float, *, last: bool) -> None:
        """Take note of a call, ``seconds`` after the first sign. ``last``: all local ranks have called now."""
        self.calls[place] += 1
        self.seconds[place] += seconds
        if last:
            self.skew.observe(seconds)
