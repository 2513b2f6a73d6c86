"""What a client was doing, in words, for those who learn that it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_SHOWN = 3


class Call(NamedTuple):
    """A call of a collective: the n-th of this client in this group, and ``since`` how many seconds."""

    number: int
    kind: str
    name: str
    since: float = 0.0

    def __str__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"{self.kind}{name} (its call {self.number})"


def describe(last: Call | None, waiting: Sequence[Call]) -> str:
    """Return what to say of one group; ``waiting``: the calls that had not ended, in their order."""
    if last is None:
        return "before its first call"
    if not waiting:
        return f"between operations: the last one that it called was {last}"
    shown = ", ".join(str(call) for call in waiting[:_SHOWN])
    more = f" and {len(waiting) - _SHOWN} more" if len(waiting) > _SHOWN else ""
    return f"while it waited for {shown}{more}, for {waiting[0].since:.3g} s"


def describe_all(groups: Sequence[tuple[str, str]]) -> str:
    """Return what to say of all groups of a client; each is its name and its description."""
    if len(groups) == 1:
        return groups[0][1]
    return "; ".join(f"in group {name!r} {doing}" for name, doing in groups)
