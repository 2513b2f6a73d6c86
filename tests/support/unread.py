"""A pipe that is full, as standard error is whose reader has stopped reading."""

from __future__ import annotations

import os


def full_pipe() -> tuple[int, int, int]:
    """Return both ends of a pipe, to read and to write, and how many bytes it holds: no further one fits in."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    filled = 0
    for size in (1 << 16, 1):
        try:
            while True:
                filled += os.write(writing, b"x" * size)
        except BlockingIOError:
            continue
    os.set_blocking(writing, True)
    return reading, writing, filled


def read_rest(reading: int) -> bytes:
    """Return all that comes until nobody can write any more, and close the end."""
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read()
