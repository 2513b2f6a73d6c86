"""Arguments of the public calls, checked for their kind: a wrong one is an error of the tree, not of Python."""

from __future__ import annotations

import math
import operator

from allreduced.core.errors import ConfigError, InvalidArgument
from allreduced.core.limits import MAX_SECONDS, check_name


def whole(value: object) -> int | None:
    """Return a whole number of any kind, NumPy's too, as an ``int``; None for everything else, also for booleans."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # that is what it finds out
    except TypeError:
        return None


def check_number(what: str, value: object) -> int | None:
    """Return a number of a process as an ``int``, or None where it was not given.

    :raises ConfigError: it is no whole number.
    """
    if value is None:
        return None
    number = whole(value)
    if number is None:
        raise ConfigError(f"{what} is {value!r}; it must be a whole number", path=what)
    return number


def check_text(what: str, value: object) -> str:
    """Return a name that the user gave.

    :raises InvalidArgument: it is no text, too long, or cannot be told in UTF-8.
    """
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} is {value!r}; it must be a text")
    check_name(what, value)
    return value


def check_deadline(what: str, seconds: object) -> float:
    """Return the duration as a float.

    :raises InvalidArgument: it is no number, not finite, not positive, or longer than can be told.
    """
    try:
        value = math.nan if isinstance(seconds, str | bytes) else float(seconds)  # type: ignore[arg-type]  # as above
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise InvalidArgument(f"{what} is {seconds!r}; it must be a finite number of seconds above 0")
    return min(value, MAX_SECONDS)
