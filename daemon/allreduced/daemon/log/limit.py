"""Which lines of the log are written, and how many there were of each event."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from allreduced.core.log_limit import KindLimit
from allreduced.daemon.log.fields import event_of_record

LINES = 60
"""Lines of one event that are written in each period; the next one says how many were left out."""

PERIOD = 60.0
"""Seconds."""


class LineLimit(logging.Filter):
    """Passes lines from ``level`` on, so many of each event, and counts all that come here.

    Lines for debugging are not limited in number: who asks for them wants them all.
    """

    def __init__(
        self, level: int, *, lines: int = LINES, period: float = PERIOD, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self.level = level
        self.lines: Counter[tuple[int, str]] = Counter()
        """By level and event, those that were not written too."""
        self.dropped: Counter[tuple[int, str]] = Counter()
        """Lines that were one too many."""
        self._limit = KindLimit(lines, period, clock)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is to be written."""
        level = record.levelno
        if level <= logging.DEBUG:
            return level >= self.level
        event = event_of_record(record)
        self.lines[level, event] += 1
        if level < self.level:
            return False
        left_out = self._limit.take(event)
        if left_out < 0:
            self.dropped[level, event] += 1
            return False
        if left_out:
            record.left_out = left_out
        return True
