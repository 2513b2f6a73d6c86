"""Numbers of bytes as people write them."""

from __future__ import annotations

from typing import Final

_UNITS: Final = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40} | {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_size(text: str) -> int:
    """Return the bytes that text such as ``512MiB``, ``8 KiB``, ``1.5GB`` or ``4096`` says.

    :raises ValueError: it is no size.
    """
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text.strip()[len(number) :].upper()
    if unit not in _UNITS:
        raise ValueError(f"{unit!r} is no unit")
    try:
        return int(float(number) * _UNITS[unit]) if "." in number else int(number) * _UNITS[unit]
    except OverflowError:
        raise ValueError("it is infinite") from None


def size_text(nbytes: int) -> str:
    """Return text that :func:`parse_size` takes, in the largest unit that fits exactly."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)
