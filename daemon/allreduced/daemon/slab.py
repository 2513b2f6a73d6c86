"""Slots for small inputs, which travel inside their submit message."""

from __future__ import annotations

from allreduced.core.errors import LimitExceeded
from allreduced.daemon.arena import Arena, ArenaKind
from allreduced.daemon.arena_table import ArenaTable
from allreduced.daemon.engine.region import Region

SLAB_BUFFER = 0
"""Number of the first slab buffer; further ones get numbers like other inputs."""


class Slab:
    """Equal slots in a few private buffers. The last slot freed is the first one used again: it is in the cache.

    The first buffer is made at once, further ones as needed, up to ``max_bytes`` in all; none is given back.
    """

    def __init__(self, arenas: ArenaTable, *, slot_bytes: int, slots: int = 512, max_bytes: int = 64 << 20) -> None:
        self._arenas = arenas
        self._slot_bytes = slot_bytes
        self._slots = slots
        self._max_bytes = max(max_bytes, slot_bytes * slots)
        self._bytes = 0
        self._free: list[tuple[int, int, memoryview]] = []
        self._used: dict[tuple[int, int], memoryview] = {}
        self._grow(SLAB_BUFFER)

    def store(self, payload: bytes | memoryview) -> Region:
        """Copy ``payload`` (1 … ``slot_bytes`` bytes) into a free slot and return where it lies.

        :raises LimitExceeded: all slots are in use and no more memory may be taken.
        :raises ValueError: the payload is empty or longer than a slot.
        """
        nbytes = len(payload)
        if not 0 < nbytes <= self._slot_bytes:
            raise ValueError(f"{nbytes} bytes do not go into a slot of {self._slot_bytes}")
        if not self._free:
            self._grow(None)
        buffer, offset, slot = self._free.pop()
        slot[:nbytes] = payload
        self._used[buffer, offset] = slot
        return Region(buffer, offset, nbytes)

    def free(self, region: Region) -> None:
        """Give a slot back; nothing reads it any more.

        :raises KeyError: no slot in use begins there.
        """
        slot = self._used.pop((region.buffer, region.offset))
        self._free.append((region.buffer, region.offset, slot))

    def close(self) -> None:
        """Let go of the memory, before the arenas are closed. Idempotent."""
        for *_, slot in self._free:
            slot.release()
        for slot in self._used.values():
            slot.release()
        self._free.clear()
        self._used.clear()

    def _grow(self, buffer: int | None) -> None:
        nbytes = self._slot_bytes * self._slots
        if self._bytes + nbytes > self._max_bytes:
            raise LimitExceeded(
                f"small tensors in flight take {self._bytes} bytes on this node, the most that the agent allows",
                limit="limits.inline_bytes",
                hint="wait for earlier operations before you submit more, or raise limits.inline_bytes",
            )
        # Pages come when they are touched, so that an idle agent is small and this takes no time on the loop.
        arena = Arena.create(ArenaKind.PRIVATE, nbytes, populate=False)
        number = self._arenas.adopt(arena, buffer=buffer)
        self._bytes += nbytes
        self._free.extend(
            (number, offset, arena.view[offset : offset + self._slot_bytes])
            for offset in reversed(range(0, nbytes, self._slot_bytes))
        )
