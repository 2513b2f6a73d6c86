"""The fields of a line of the log, out of its template and arguments."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from allreduced.core.log_limit import event_of

Value: TypeAlias = "str | int | float | bool"

FOREIGN: Final = "message"
"""The event of lines that do not come from allreduced, such as those of asyncio."""

MAX_VALUE = 2048
"""Characters of one value; more are cut off."""

PAIR = re.compile(r"([a-z][a-z0-9_]*)=(%(?:\.\d+)?[sdrfg]|[A-Za-z0-9_.:-]+)")
"""A key, and a conversion or a fixed word."""

_PLAIN = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f-\x9f\u2028\u2029]+")


class Field(NamedTuple):
    """``text``: how the value is written in a line for people; it is one word, or quoted."""

    key: str
    value: Value
    text: str


@lru_cache(maxsize=1024)
def pairs_of(template: str) -> tuple[tuple[str, str], ...] | None:
    """Return the (key, conversion or word) pairs of a template; None if it is not made of them alone."""
    pairs = []
    for word in template.split(" "):
        match = PAIR.fullmatch(word)
        if match is None:
            return None
        pairs.append((match[1], match[2]))
    return tuple(pairs) if pairs and pairs[0][0] == "event" and not pairs[0][1].startswith("%") else None


def fields_of(record: logging.LogRecord) -> list[Field]:
    """Return the fields of a line, the event first. A line that is no pairs is one field, ``message``."""
    pairs = pairs_of(record.msg) if isinstance(record.msg, str) else None
    args = record.args if isinstance(record.args, tuple) else (record.args,) if record.args else ()
    if pairs is None or sum(given.startswith("%") for _, given in pairs) != len(args):
        text = _short(record.getMessage())
        return [_word("event", FOREIGN), Field("message", text, repr(text))]
    rest = iter(args)
    fields = [
        _converted(key, given, next(rest)) if given.startswith("%") else _word(key, given) for key, given in pairs
    ]
    left_out = getattr(record, "left_out", 0)
    if left_out:
        fields.append(Field("left_out", left_out, str(left_out)))
    return fields


def event_of_record(record: logging.LogRecord) -> str:
    """Return the event of a line."""
    return (event_of(record.msg) if isinstance(record.msg, str) else "") or FOREIGN


def _word(key: str, value: str) -> Field:
    return Field(key, value, value)


def _converted(key: str, conversion: str, value: object) -> Field:
    kind = conversion[-1]
    if isinstance(value, bool):
        return Field(key, value, str(value))
    if isinstance(value, int | float) and kind in "dfg":
        text = conversion % value
        return Field(key, int(value) if kind == "d" else float(text), text)
    if isinstance(value, int | float):
        return Field(key, value, str(value))
    if kind == "r" and not isinstance(value, str):
        shown = _short(repr(value))
        return Field(key, shown, shown)
    shown = _short(str(value))
    return Field(key, shown, repr(shown) if kind == "r" else quoted(shown))


def quoted(value: str) -> str:
    """Return a value as it stands in a line for people: one word, or quoted as Python does."""
    return value if _PLAIN.fullmatch(value) else repr(value)


def _short(text: str) -> str:
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}… ({len(text)} characters)"
