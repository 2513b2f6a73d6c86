"""Errors inside messages: checked when they come in, kept to a bounded size when they go out."""

from __future__ import annotations

from allreduced.core.errors import Fact, ProtocolError, WireError

MAX_CODE = 64
"""Bytes of an error's code at most."""

MAX_TEXT = 4096
"""Bytes of the message, of the hint and of any text among the facts at most; longer ones are cut when sent."""

MAX_KEY = 256
"""Bytes of the name of a fact at most."""

MAX_ITEMS = 1 << 16
"""Items of any array or map among the facts at most."""

MAX_DEPTH = 4
"""Arrays and maps within each other among the facts at most."""

MAX_FACTS = 640 << 10
"""Bytes that all facts of an error together may have when sent; what does not fit is left out. A rank per item fits."""


class Marker:
    """Stands for the type ``WireError`` where field types are read."""


# Incoming


def check(path: str, value: object) -> WireError:
    """Return the error that a decoded array tells.

    :raises ProtocolError: it is not ``(code, message, hint, facts)`` within the limits.
    """
    if type(value) is not tuple or len(value) < 4:
        raise ProtocolError(f"{path} must be an array of code, message, hint and facts")
    code, message, hint, facts = value[:4]
    for name, text, most in (("code", code, MAX_CODE), ("message", message, MAX_TEXT), ("hint", hint, MAX_TEXT)):
        if type(text) is not str or _length(text) > most:
            raise ProtocolError(f"{path}.{name} must be text of at most {most} bytes")
    if type(facts) is not dict:
        raise ProtocolError(f"{path}.facts must be a map")
    return (code, message, hint, _map(f"{path}.facts", facts, 1))


def _map(path: str, value: dict[object, object], depth: int) -> dict[str, Fact]:
    checked: dict[str, Fact] = {}
    for key, item in value.items():
        if type(key) is not str or _length(key) > MAX_KEY:
            raise ProtocolError(f"{path} must have names of at most {MAX_KEY} bytes")
        checked[key] = _fact(path, item, depth)
    return checked


def _fact(path: str, value: object, depth: int) -> Fact:
    if value is None or isinstance(value, bool | int | float):
        return value
    if type(value) is str and _length(value) <= MAX_TEXT:
        return value
    if type(value) in (tuple, dict) and depth == MAX_DEPTH:
        raise ProtocolError(f"{path} is nested deeper than {MAX_DEPTH}")
    if type(value) is tuple:
        return [_fact(path, item, depth + 1) for item in value]
    if type(value) is dict:
        return _map(path, value, depth + 1)
    raise ProtocolError(f"{path} must have texts of at most {MAX_TEXT} bytes, numbers, arrays and maps only")


def _length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


# Outgoing


def bounded(error: WireError) -> WireError:
    """Return the error with texts cut and facts left out where it would not fit into a message."""
    code, message, hint, facts = error
    kept, _ = _keep_map(facts, MAX_FACTS, 1)
    return (code, _cut(message, MAX_TEXT), _cut(hint, MAX_TEXT), kept)


def _cut(text: str, most: int) -> str:
    # Paths may hold bytes that are no UTF-8; they are shown escaped.
    data = text.encode(errors="backslashreplace")
    return data.decode() if len(data) <= most else data[: most - 3].decode(errors="ignore") + "…"


def _keep(value: Fact, room: int, depth: int) -> tuple[Fact, int]:
    """Return as much of the value as fits into ``room`` bytes, and the room that is left (negative: it did not fit)."""
    if isinstance(value, str):
        value = _cut(value, MAX_TEXT)
        return value, room - _length(value) - 5
    if isinstance(value, list | dict) and depth == MAX_DEPTH:
        return None, room - 9
    if isinstance(value, list):
        items: list[Fact] = []
        room -= 5
        for item in value[:MAX_ITEMS]:
            kept, room = _keep(item, room, depth + 1)
            if room < 0:
                break
            items.append(kept)
        return items, max(room, 0)
    if isinstance(value, dict):
        return _keep_map(value, room - 5, depth + 1)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return _keep(str(value), room, depth)
    return value, room - 9


def _keep_map(value: dict[str, Fact], room: int, depth: int) -> tuple[dict[str, Fact], int]:
    items: dict[str, Fact] = {}
    for key, item in list(value.items())[:MAX_ITEMS]:
        name = _cut(key, MAX_KEY)
        kept, room = _keep(item, room - _length(name) - 5, depth)
        if room < 0:
            break
        items[name] = kept
    return items, max(room, 0)
