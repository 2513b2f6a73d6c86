"""At most so many lines a minute about one kind of event, and a count of the rest."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

DROPPED: Counter[tuple[int, str]] = Counter()
"""Lines that were left out in this process, by level and event. For this process, as logging itself is."""

MAX_KINDS = 256
"""Kinds that are told apart at once; events are named in the code, so there are not so many."""


def event_of(text: str) -> str:
    """Return the event that a line's text names, ``peer_lost`` for ``event=peer_lost node=%s``; empty for none."""
    begin, _, _ = text.partition(" ")
    return begin.removeprefix("event=") if begin.startswith("event=") else ""


class KindLimit:
    """Lets ``lines`` of each kind through in every ``period`` seconds, and counts the rest."""

    def __init__(self, lines: int, period: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines = lines
        self._period = period
        self._clock = clock
        self._windows: dict[str, list[float]] = {}
        """By kind: when its period began, lines let through in it, lines left out since the last one."""

    def take(self, kind: str) -> int:
        """Return -1 for a line that is one too many, else how many of its kind were left out before it."""
        now = self._clock()
        window = self._windows.get(kind)
        if window is None:
            if len(self._windows) >= MAX_KINDS:
                del self._windows[next(iter(self._windows))]
            window = self._windows[kind] = [now, 0, 0]
        if now - window[0] >= self._period:
            window[0], window[1] = now, 0
        if window[1] >= self._lines:
            window[2] += 1
            return -1
        window[1] += 1
        left_out, window[2] = int(window[2]), 0
        return left_out


class LogLimit:
    """Lets ``lines`` of each event through in every ``period`` seconds and counts the rest.

    Somebody who sends garbage in a loop must not fill the disk; the next line says how many were left out.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        lines: int = 20,
        period: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._limit = KindLimit(lines, period, clock)

    def warning(self, text: str, *args: object) -> None:
        """Log like ``logger.warning``, or count."""
        self.log(logging.WARNING, text, *args)

    def log(self, level: int, text: str, *args: object) -> None:
        """Log like ``logger.log``, or count."""
        event = event_of(text)
        left_out = self._limit.take(event)
        if left_out < 0:
            DROPPED[level, event] += 1
            return
        if left_out:
            text, args = f"{text} left_out=%d", (*args, left_out)
        self._logger.log(level, text, *args)
