"""What takes the place of ``sys.stderr`` in an agent, for all that is said there beside the log."""

from __future__ import annotations

import io
import os
import threading
from typing import Final

from allreduced.daemon.log.writer import Line, LineWriter

_LONGEST: Final = 64 << 10
"""Characters of a line that are kept until its end comes; what is longer goes on in parts."""


class ErrorStream(io.TextIOBase):
    """Hands whole lines to ``writer``: warnings and tracebacks of Python itself hold up nobody then, as the log does.

    Whoever asks for the descriptor, as the fault handler does, gets the real one.
    """

    def __init__(self, writer: LineWriter, descriptor: int, encoding: str) -> None:
        super().__init__()
        self.writer = writer
        self._descriptor = descriptor
        self._encoding = encoding
        self._partial = ""
        self._lock = threading.RLock()

    @property
    def encoding(self) -> str:  # type: ignore[override] # the base class has a variable
        """Return the encoding of the descriptor."""
        return self._encoding

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        """Take a text; what ends a line goes on at once."""
        with self._lock:
            lines, end, self._partial = (self._partial + text).rpartition("\n")
            if end:
                self.writer.put(Line(lines + end))
            if len(self._partial) > _LONGEST:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Let a line go on that has no end yet. Nothing waits until it is written; :meth:`finish` does."""
        with self._lock:
            rest, self._partial = self._partial, ""
        if rest:
            self.writer.put(Line(rest))

    def finish(self) -> None:
        """Wait until all is written, as long as the writer has patience."""
        self.flush()
        self.writer.finish()
