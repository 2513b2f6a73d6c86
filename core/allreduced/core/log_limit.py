"""At most so many lines a minute about what others do wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class LogLimit:
    """Lets ``lines`` warnings through in every ``period`` seconds and counts the rest.

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
        self._lines = lines
        self._period = period
        self._clock = clock
        self._begin = clock()
        self._used = 0
        self._left_out = 0

    def warning(self, text: str, *args: object) -> None:
        """Log like ``logger.warning``, or count."""
        self.log(logging.WARNING, text, *args)

    def log(self, level: int, text: str, *args: object) -> None:
        """Log like ``logger.log``, or count."""
        now = self._clock()
        if now - self._begin >= self._period:
            self._begin, self._used = now, 0
        if self._used >= self._lines:
            self._left_out += 1
            return
        self._used += 1
        if self._left_out:
            text, args = f"{text} left_out=%d", (*args, self._left_out)
            self._left_out = 0
        self._logger.log(level, text, *args)
