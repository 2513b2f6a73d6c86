"""Makes lines of what is logged, and has them written."""

from __future__ import annotations

import logging

from allreduced.daemon.log.journal import JournalEntries
from allreduced.daemon.log.writer import Line, LineWriter


class LineHandler(logging.Handler):
    """Hands lines to ``writer``, whole: nothing of a record is looked at later. ``entries``: where there is a journal.

    Lines that are lost are told as one more line, ``log_lines_lost``.
    """

    def __init__(self, writer: LineWriter, entries: JournalEntries | None = None) -> None:
        super().__init__()
        self.writer = writer
        self._entries = entries
        writer.tell = self._lost

    def emit(self, record: logging.LogRecord) -> None:
        """Take one line; tell of a defect in it as logging does."""
        try:
            line = self._line(record)
        except Exception:
            self.handleError(record)
        else:
            self.writer.put(line)

    def flush(self) -> None:
        """Wait until all is written, as long as the writer has patience."""
        self.writer.finish()

    def close(self) -> None:
        """Close the writer."""
        self.writer.close()
        super().close()

    def _line(self, record: logging.LogRecord) -> Line:
        entry = b"" if self._entries is None else self._entries.entry_of(record)
        return Line(f"{self.format(record)}\n", entry)

    def _lost(self, lines: int) -> Line:
        text = "event=log_lines_lost lines=%d"
        name, function = "allreduced.log", self._lost.__qualname__
        return self._line(logging.LogRecord(name, logging.WARNING, __file__, 0, text, (lines,), None, function))
