"""Logging of the agent, set up in one place: on standard error, or with fields in systemd's journal.

Neither holds up the agent: a thread writes, and what nobody takes is lost and counted. ``docs/monitoring.md`` tells the
form of the lines.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Mapping
from typing import Final, Literal, TextIO, TypeAlias, cast

from allreduced.core.log_limit import DROPPED
from allreduced.daemon.log.descriptor import Descriptor
from allreduced.daemon.log.formats import JsonFormatter, TextFormatter
from allreduced.daemon.log.handler import LineHandler
from allreduced.daemon.log.journal import Journal, JournalEntries, is_on_journal
from allreduced.daemon.log.limit import LineLimit
from allreduced.daemon.log.stream import ErrorStream
from allreduced.daemon.log.writer import LineWriter

Format: TypeAlias = Literal["text", "json"]

OURS: Final = "allreduced"
"""The logger above all of ours."""


_STDERR: Final = 2


def take_stderr(environ: Mapping[str, str] | None = None) -> None:
    """From now on let nothing wait that writes to ``sys.stderr``, be it before, beside or after the log.

    For the rest of this process, whose end waits a moment for what is still to be written.
    """
    if isinstance(sys.stderr, ErrorStream):
        return
    stream = ErrorStream(_line_writer(os.environ if environ is None else environ), _STDERR, _encoding())
    atexit.register(stream.finish)  # an error that ends the process is on the stream by then
    sys.stderr = cast("TextIO", stream)


def configure(level: str, node: str, style: Format = "text", environ: Mapping[str, str] | None = None) -> None:
    """Log ``allreduced.*`` from ``level`` on, everything else from warnings on.

    ``style``: lines for people, or an object of JSON each. Either goes to the journal with fields where standard error
    is the journal's.
    """
    environ = os.environ if environ is None else environ
    writer = sys.stderr.writer if isinstance(sys.stderr, ErrorStream) else _line_writer(environ)
    formatter = JsonFormatter(node) if style == "json" else TextFormatter(node)
    entries = JournalEntries(node, formatter if style == "json" else None) if is_on_journal(environ) else None
    handler = LineHandler(writer, entries)
    handler.setFormatter(formatter)
    handler.addFilter(LineLimit(_number(level)))
    root = logging.getLogger()
    for old in _handlers():
        if old.writer is not writer:
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


def lost_lines() -> int:
    """Return how many lines were to be written, and nobody took them."""
    return sum(handler.writer.lost for handler in _handlers())


def _line_writer(environ: Mapping[str, str]) -> LineWriter:
    descriptor = Descriptor(_STDERR, _encoding())
    return LineWriter(Journal(descriptor) if is_on_journal(environ) else descriptor)


def _encoding() -> str:
    return getattr(sys.stderr, "encoding", None) or "utf-8"


def _handlers() -> list[LineHandler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, LineHandler)]


def _limits() -> list[LineLimit]:
    return [limit for handler in _handlers() for limit in handler.filters if isinstance(limit, LineLimit)]


def _number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]
