"""A stretch of memory, as the engine names it."""

from __future__ import annotations

from typing import NamedTuple


class Region(NamedTuple):
    """``nbytes`` bytes at ``offset`` of the buffer with this number. The driver knows where the buffer is."""

    buffer: int
    offset: int
    nbytes: int


FIRST_ENGINE_BUFFER = 1 << 32
"""Buffers from here on are created by the engine (CreateArena); lower ones are inputs, numbered by the driver."""
