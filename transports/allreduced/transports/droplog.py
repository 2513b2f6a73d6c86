"""Log lines about dropped connections, few enough that strangers cannot fill the disk."""

from __future__ import annotations

import logging

LINES_PER_PERIOD = 10
PERIOD = 10.0
"""Seconds."""


class DropLog:
    """Writes at most ``LINES_PER_PERIOD`` warnings per period, and how many were left out with the next one."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._begun = float("-inf")
        self._written = 0
        self._left_out = 0

    def dropped(self, now: float, source: str, reason: str) -> None:
        """Report one dropped connection. ``now`` in seconds of any monotonic clock."""
        if now - self._begun >= PERIOD:
            self._begun, self._written = now, 0
        if self._written == LINES_PER_PERIOD:
            self._left_out += 1
            return
        self._written += 1
        self._log.warning("event=connection_dropped from=%s reason=%r left_out=%d", source, reason, self._left_out)
        self._left_out = 0
