"""Logging of the agent, set up in one place: on standard error, or with fields in systemd's journal.

``docs/monitoring.md`` tells the form of the lines.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from allreduced.core.log_limit import DROPPED
from allreduced.daemon.log.formats import JsonFormatter, TextFormatter
from allreduced.daemon.log.journal import JournalHandler, is_on_journal
from allreduced.daemon.log.limit import LineLimit
from allreduced.daemon.log.stream import StderrHandler

Format: TypeAlias = Literal["text", "json"]

OURS: Final = "allreduced"
"""The logger above all of ours."""


def configure(level: str, node: str, style: Format = "text", environ: Mapping[str, str] | None = None) -> None:
    """Log ``allreduced.*`` from ``level`` on, everything else from warnings on.

    ``style``: lines for people, or an object of JSON each. Either goes to the journal with fields where standard error
    is the journal's.
    """
    stream: logging.Handler = StderrHandler(sys.stderr)
    stream.setFormatter(JsonFormatter(node) if style == "json" else TextFormatter(node))
    handler = stream
    if is_on_journal(os.environ if environ is None else environ):
        handler = JournalHandler(node, stream)
        if style == "json":
            handler.setFormatter(stream.formatter)
    handler.addFilter(LineLimit(_number(level)))
    root = logging.getLogger()
    for old in root.handlers:
        if isinstance(old, JournalHandler):
            old.close()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_level(level)


def set_level(level: str) -> None:
    """Log ``allreduced.*`` from ``level`` on, from now on: "debug", "info", "warning" or "error".

    Warnings are counted for the metrics whatever the level is.
    """
    number = _number(level)
    for limit in _limits():
        limit.level = number
    logging.getLogger(OURS).setLevel(min(number, logging.WARNING))


def line_counts() -> list[tuple[int, str, int, int]]:
    """Return (level, event, lines, lines of them that were not written); nothing about lines for debugging."""
    lines, dropped = DROPPED.copy(), DROPPED.copy()
    for limit in _limits():
        lines.update(limit.lines)
        dropped.update(limit.dropped)
    return [(*key, lines[key], dropped[key]) for key in sorted({*lines, *dropped})]


def _limits() -> list[LineLimit]:
    handlers = logging.getLogger().handlers
    return [limit for handler in handlers for limit in handler.filters if isinstance(limit, LineLimit)]


def _number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]
