"""Groups whose ranks expected different sizes, remembered for a while: late ranks must not wait for the refused."""

from __future__ import annotations

from dataclasses import dataclass

from allreduced.core.errors import MismatchError
from allreduced.daemon.membership.gathering import Scope


@dataclass(frozen=True, slots=True)
class _Known:
    error: MismatchError
    until: float


class Disagreements:
    """The groups of the last ``seconds`` whose ranks were refused for their sizes.

    A rank that comes again begins a new attempt: then the old one does not count any more.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._known: dict[Scope, _Known] = {}

    def add(self, scope: Scope, error: MismatchError, now: float) -> None:
        """Take note of what the ranks of a group were told."""
        for other in [other for other, known in self._known.items() if known.until <= now]:
            del self._known[other]
        self._known[scope] = _Known(error, now + self._seconds)

    def claimed(self, scope: Scope, rank: int, now: float) -> MismatchError | None:
        """Take note of a new claim, and return why it cannot be served: those that it would wait for were refused."""
        known = self._known.get(scope)
        if known is None:
            return None
        if known.until <= now or rank in known.error.by_rank:
            del self._known[scope]
            return None
        return known.error
