"""A line of the log for people, and one for machines."""

from __future__ import annotations

import datetime
import json
import logging

from allreduced.daemon.log.fields import fields_of, quoted


class TextFormatter(logging.Formatter):
    """``TIME LEVEL node=NODE LOGGER event=… key=value …``; what is not one word is quoted as Python does.

    A traceback follows on lines of its own.
    """

    def __init__(self, node: str) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self._node = quoted(node)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        head = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d} {record.levelname} node={self._node}"
        line = f"{head} {record.name} {text_of(record)}"
        trace = traceback_of(self, record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """One object a line.

    ``time`` (UTC), ``level``, ``node``, ``logger``, ``event``, the event's own keys, ``traceback`` where there is one.
    """

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "node": self._node,
            "logger": record.name,
        }
        for field in fields_of(record):
            line.setdefault(field.key, field.value)
        trace = traceback_of(self, record)
        if trace:
            line["traceback"] = trace
        return json.dumps(line, ensure_ascii=False)


def text_of(record: logging.LogRecord) -> str:
    """Return ``event=… key=value …``."""
    return " ".join(f"{field.key}={field.text}" for field in fields_of(record))


def traceback_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the traceback of a line; empty where it has none."""
    return formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] is not None else ""
