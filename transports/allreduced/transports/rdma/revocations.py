"""Which receives of the peer may not be written to any more, and when that can be confirmed to it. Sans-IO."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_REVOKED: Final = 1 << 16
"""Revocations that are remembered; a write under an older one is refused by the peer's device and ends the link."""


class Revocations:
    """The sender's side. Receives are named by their serials, which are never used twice."""

    def __init__(self) -> None:
        self._revoked: OrderedDict[int, None] = OrderedDict()
        self._writing: dict[int, int] = {}
        """Writes that are on their way."""
        self._asked: set[int] = set()
        """Revoked ones with writes on their way."""

    def __contains__(self, serial: int) -> bool:
        """Tell whether no write may begin any more."""
        return serial in self._revoked

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._revoked)

    def begin_write(self, serial: int) -> None:
        """Note that a write is on its way from now on."""
        self._writing[serial] = self._writing.get(serial, 0) + 1

    def end_write(self, serial: int) -> bool:
        """Note that a write is in place. Return whether the revocation can be confirmed by that."""
        left = self._writing[serial] - 1
        if left:
            self._writing[serial] = left
            return False
        del self._writing[serial]
        confirmed = serial in self._asked
        self._asked.discard(serial)
        return confirmed

    def revoke(self, serial: int) -> bool:
        """Note that the peer wants no write any more. Return whether that can be confirmed at once."""
        self._revoked[serial] = None
        if len(self._revoked) > MAX_REVOKED:
            self._revoked.popitem(last=False)
        if serial in self._writing:
            self._asked.add(serial)
            return False
        return True
