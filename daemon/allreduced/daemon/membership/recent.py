"""A memory of the last few things, so that what peers say can never fill the agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """A mapping from numbers that keeps the last ``limit`` entries made."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: dict[int, T] = {}

    def add(self, number: int, value: T) -> None:
        """Set an entry; the oldest one goes if there are too many."""
        self._entries.pop(number, None)
        self._entries[number] = value
        if len(self._entries) > self._limit:
            del self._entries[next(iter(self._entries))]

    def get_or_add(self, number: int, make: Callable[[], T]) -> T:
        """Return the entry, made anew if there is none."""
        if number not in self._entries:
            self.add(number, make())
        return self._entries[number]

    def pop(self, number: int) -> T | None:
        """Take the entry out, if it is there."""
        return self._entries.pop(number, None)

    def get(self, number: int) -> T | None:
        """Return the entry, if it is there."""
        return self._entries.get(number)
