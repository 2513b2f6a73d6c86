"""How often each name was called in a group, and the names of operations that follow from it.

A list of tensors of several dtypes is several operations at the agent. The first has the name of the call and is what
all ranks meet at, whatever they give: it tells all shapes and dtypes, so that lists which differ fail there. Whether
there are more depends on the list. They have names that no other call has, so that one that the others never made
stays alone and is met by no later call.
"""

from __future__ import annotations

import hashlib

from allreduced.core.dtypes import DType
from allreduced.core.limits import MAX_NAME

MAX_NAMES = 1 << 16
"""Names whose calls are counted; of more, those that were not called for longest begin anew."""


class Uses:
    """Counts the calls of each name on one rank, as the agents do."""

    __slots__ = ("_unnamed", "_uses")

    def __init__(self) -> None:
        self._unnamed = 0
        self._uses: dict[str, int] = {}

    def count(self, name: str) -> int:
        """Return how often ``name`` was called before this call, which counts from now on."""
        if not name:
            self._unnamed += 1
            return self._unnamed - 1
        uses = self._uses
        use = uses.pop(name, 0)
        uses[name] = use + 1
        if len(uses) > MAX_NAMES:
            del uses[next(iter(uses))]
        return use


def further_name(name: str, dtype: DType, use: int) -> str:
    """Return the name of the operation for the tensors of ``dtype``, not the first one, of call ``use`` of ``name``."""
    suffix = f"/{dtype.label}#{use}"
    if len(name.encode()) + len(suffix) > MAX_NAME:
        name = hashlib.sha256(name.encode()).hexdigest()
    return name + suffix
