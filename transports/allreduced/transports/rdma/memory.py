"""Memory of links: where a buffer lies, and the slots that small messages travel in."""

from __future__ import annotations

import mmap
from collections import deque

import numpy as np

from allreduced.transports.rdma.verbs_port import Domain, Region


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a buffer that is not empty."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


class Slots:
    """Equal pieces of registered memory that only this end reads and writes.

    ``free`` holds the numbers that are not in use; who takes one puts it back.
    """

    def __init__(self, domain: Domain, count: int, size: int) -> None:
        self.size = size
        self.free = deque(range(count))
        # Shared, not private: a fork would move private pages away from under the device.
        self._memory = mmap.mmap(-1, count * size)
        self._view = memoryview(self._memory)
        self._address = address_of(self._view)
        self._region: Region | None = domain.register(self._address, count * size, local_write=True, remote_write=False)
        self.key = self._region.local_key

    def address(self, slot: int) -> int:
        """Return where a slot lies."""
        return self._address + slot * self.size

    def view(self, slot: int, length: int) -> memoryview:
        """Return the first ``length`` bytes of a slot."""
        start = slot * self.size
        return self._view[start : start + length]

    def close(self) -> None:
        """Give the memory back. No queue pair may use it any more."""
        region, self._region = self._region, None
        if region is not None:
            region.close()
            self._view.release()
            del self._memory  # unmapped with the last piece of it, which a traceback may hold
