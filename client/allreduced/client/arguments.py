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
    value = _seconds(seconds)
    if not math.isfinite(value) or value <= 0:
        hint = f"nothing waits for ever; for as good as no limit give {MAX_SECONDS:g}" if value == math.inf else ""
        raise InvalidArgument(f"{what} is {seconds!r}; it must be a finite number of seconds above 0", hint=hint)
    return min(value, MAX_SECONDS)


def check_timeout(seconds: object) -> float | None:
    """Return the ``timeout`` of a wait as a float; 0 does not wait at all, infinity is the same as None: no timeout.

    :raises InvalidArgument: it is no number, or negative.
    """
    if seconds is None:
        return None
    value = _seconds(seconds)
    if not value >= 0:  # NaN is not
        raise InvalidArgument(f"timeout is {seconds!r}; it must be a number of seconds from 0, or None for no timeout")
    return None if value == math.inf else value


def _seconds(value: object) -> float:
    """Return any kind of number as a float; NaN for what is none, also for text and booleans."""
    try:
        return math.nan if isinstance(value, str | bytes | bool) else float(value)  # type: ignore[arg-type]  # as above
    except (TypeError, ValueError, OverflowError):
        return math.nan
