"""Lines of the log on a descriptor, such as standard error."""

from __future__ import annotations

import os
import select

from allreduced.daemon.log.writer import Line


class Descriptor:
    """An outlet that writes to ``descriptor`` in ``encoding``; what that lacks is written as an escape.

    It waits for a reader also where somebody who shares the descriptor made it non-blocking.
    """

    def __init__(self, descriptor: int, encoding: str) -> None:
        self._descriptor = descriptor
        self._encoding = encoding
        self._torn = False

    def write(self, line: Line) -> None:
        """Write the text of a line.

        :raises OSError: it, or the rest of it, is lost.
        """
        text = f"\n{line.text}" if self._torn else line.text  # not behind a part of another line
        left = memoryview(text.encode(self._encoding, "backslashreplace"))
        while left:
            try:
                written = os.write(self._descriptor, left)
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
                continue
            self._torn = written < len(left)
            left = left[written:]

    def close(self) -> None:
        """Leave the descriptor open: it is the process's own."""
