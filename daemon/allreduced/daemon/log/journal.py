"""Sends lines of the log to systemd's journal with their fields, by its native protocol.

The protocol is a datagram of ``KEY=value`` lines (systemd.io/JOURNAL_NATIVE_PROTOCOL). What is needed of it is shorter
than the build of a library for it would be.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Final

from allreduced.daemon.log.fields import fields_of
from allreduced.daemon.log.formats import text_of, traceback_of
from allreduced.daemon.log.writer import Line, Outlet

SOCKET: Final = "/run/systemd/journal/socket"

PREFIX: Final = "ALLREDUCED_"
"""What the names of the event's own fields begin with: ``ALLREDUCED_EVENT``, ``ALLREDUCED_JOB``."""

MAX_MESSAGE = 32 << 10
"""Bytes of a message; a longer one is cut off. A datagram takes a few times as much."""

_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


def is_on_journal(environ: Mapping[str, str], descriptor: int = 2) -> bool:
    """Return whether the descriptor is the stream to the journal that systemd gave this process (JOURNAL_STREAM)."""
    device, colon, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    if not (colon and device.isdigit() and inode.isdigit()):
        return False
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (int(device), int(inode))


def priority_of(level: int) -> int:
    """Return the syslog priority of a level of logging."""
    return next((priority for least, priority in _PRIORITIES if level >= least), _DEBUG)


def datagram(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return fields in the journal's native protocol: a value of several lines has its length before it."""
    parts = []
    for key, value in fields:
        data = value.encode("utf-8", "backslashreplace")[:MAX_MESSAGE]
        if b"\n" in data:
            parts.append(key.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n")
        else:
            parts.append(key.encode() + b"=" + data + b"\n")
    return b"".join(parts)


class JournalEntries:
    """Makes an entry with fields of each line.

    The message is what ``formatter`` makes of the line, without one the event's own pairs.
    """

    def __init__(self, node: str, formatter: logging.Formatter | None = None) -> None:
        self._node = node
        self._formatter = formatter
        self._traces = logging.Formatter()

    def entry_of(self, record: logging.LogRecord) -> bytes:
        """Return the entry of one line."""
        return datagram(self._fields(record))

    def _fields(self, record: logging.LogRecord) -> Iterable[tuple[str, str]]:
        yield "MESSAGE", self._formatter.format(record) if self._formatter else self._text(record)
        yield "PRIORITY", str(priority_of(record.levelno))
        yield "SYSLOG_IDENTIFIER", "allreduced"
        yield "LOGGER", record.name
        yield "CODE_FILE", record.pathname
        yield "CODE_LINE", str(record.lineno)
        yield "CODE_FUNC", record.funcName or ""
        yield f"{PREFIX}NODE", self._node
        for field in fields_of(record):
            yield f"{PREFIX}{field.key.upper()}", str(field.value)

    def _text(self, record: logging.LogRecord) -> str:
        """Return the line without what the journal knows by itself."""
        text, trace = text_of(record), traceback_of(self._traces, record)
        return f"{text}\n{trace}" if trace else text


class Journal:
    """An outlet that sends entries to the journal, and waits where that is busy.

    What the journal does not take, and lines without an entry, go to ``otherwise``.
    """

    def __init__(self, otherwise: Outlet, path: str = SOCKET) -> None:
        self._otherwise = otherwise
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def write(self, line: Line) -> None:
        """Send one line.

        :raises OSError: it is lost.
        """
        if line.entry:
            try:
                self._socket.sendto(line.entry, self._path)
            except OSError:  # too long, or no journal there: whatever happens, the line must be somewhere
                self._otherwise.write(line)
        else:
            self._otherwise.write(line)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._otherwise.close()
