"""Objects of pyverbs that are closed once, and the descriptors that their events come through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from allreduced.transports.rdma.verbs.binding import translated
from allreduced.transports.rdma.verbs_port import VerbsError


def _event_descriptors() -> set[int]:
    """Return the descriptors of this process that verbs events come through."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "infinibandevent" in str(entry.readlink()):
                found.add(int(entry.name))
        except OSError:
            continue  # the descriptor of this very listing
    return found


def with_descriptor(make: Callable[[], Any]) -> tuple[Any, int]:
    """Make something that opens one event descriptor, and return both.

    pyverbs 44 does not tell the descriptor of a channel, none tells that of a device.
    """
    before = _event_descriptors()
    made = make()
    new = _event_descriptors() - before
    if len(new) != 1:
        made.close()
        raise VerbsError(f"{len(new)} new event descriptors where one was expected")
    return made, new.pop()


class Closable:
    """Closes an object of pyverbs once."""

    def __init__(self, name: str, handle: Any) -> None:
        self._name = name
        self._handle = handle
        self._closed = False

    def _open_handle(self) -> Any:
        """Return the object, which pyverbs would use without a look once it is closed: a crash.

        :raises VerbsError: it is closed.
        """
        if self._closed:
            raise VerbsError(f"{self._name} was closed")
        return self._handle

    def close(self) -> None:
        """Close it, unless that was done.

        :raises VerbsError: the device refuses.
        """
        if not self._closed:
            self._closed = True
            with translated(f"cannot close {self._name}"):
                self._handle.close()
