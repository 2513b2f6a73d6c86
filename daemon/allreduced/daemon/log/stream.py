"""Writes lines of the log to standard error, as long as that takes them."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class StderrHandler(logging.StreamHandler[TextIO]):
    """Loses the lines that cannot be written: the disk is full, or nobody reads. The agent goes on all the same."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 # logging's name
        """Be silent about what standard error does not take; tell of a defect of the line as logging does."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)
