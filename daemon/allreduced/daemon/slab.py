"""Slots for small inputs, which travel inside their submit message."""

from __future__ import annotations

from collections import Counter
from typing import Final

from allreduced.core.errors import LimitExceeded
from allreduced.daemon.arena import Arena, ArenaKind
from allreduced.daemon.arena_table import ArenaTable
from allreduced.daemon.engine.region import Region

SLAB_BUFFER = 0
"""Number of the first slab buffer; further ones get numbers like other inputs."""


FREE_TIMES: Final = 3
"""How many times as much as is left for others one user may hold: alone, three quarters of all.

A limit that follows what is free leaves some for whoever comes next, however many there are (Choudhury, Hahne, "Dynamic
queue length thresholds for shared-memory packet switches", 1998).
"""


class Slab:
    """Equal slots in a few private buffers. The last slot freed is the first one used again: it is in the cache.

    The first buffer is made at once, further ones as needed, up to ``max_bytes`` in all; none is given back.
    """

    def __init__(self, arenas: ArenaTable, *, slot_bytes: int, slots: int = 512, max_bytes: int = 64 << 20) -> None:
        self._arenas = arenas
        self._slot_bytes = slot_bytes
        self._slots = slots
        self._most = max(max_bytes // (slot_bytes * slots), 1) * slots
        """Slots in all."""
        self._free: list[tuple[int, int, memoryview]] = []
        self._used: dict[tuple[int, int], tuple[memoryview, int]] = {}
        """Where slots in use are: each with the uid of its user."""
        self._held: Counter[int] = Counter()
        """Slots in use by uid."""
        self._grow(SLAB_BUFFER)

    def store(self, payload: bytes | memoryview, uid: int) -> Region:
        """Copy ``payload`` (1 … ``slot_bytes`` bytes) into a free slot, for a user, and return where it lies.

        :raises LimitExceeded: the user has its share of the slots.
        :raises ValueError: the payload is empty or longer than a slot.
        """
        nbytes = len(payload)
        if not 0 < nbytes <= self._slot_bytes:
            raise ValueError(f"{nbytes} bytes do not go into a slot of {self._slot_bytes}")
        if self._held[uid] >= FREE_TIMES * (self._most - len(self._used)):
            raise LimitExceeded(
                f"small tensors of uid {uid} in flight take {self._held[uid] * self._slot_bytes} bytes on this node, of"
                f" {self._most * self._slot_bytes}: the rest is for others",
                limit="limits.inline_bytes",
                hint="wait for earlier operations before you submit more, or raise limits.inline_bytes",
            )
        if not self._free:
            self._grow(None)
        buffer, offset, slot = self._free.pop()
        slot[:nbytes] = payload
        self._used[buffer, offset] = slot, uid
        self._held[uid] += 1
        return Region(buffer, offset, nbytes)

    def free(self, region: Region) -> None:
        """Give a slot back; nothing reads it any more.

        :raises KeyError: no slot in use begins there.
        """
        slot, uid = self._used.pop((region.buffer, region.offset))
        self._held[uid] -= 1
        if not self._held[uid]:
            del self._held[uid]
        self._free.append((region.buffer, region.offset, slot))

    def close(self) -> None:
        """Let go of the memory, before the arenas are closed. Idempotent."""
        for *_, slot in self._free:
            slot.release()
        for slot, _ in self._used.values():
            slot.release()
        self._free.clear()
        self._used.clear()
        self._held.clear()

    def _grow(self, buffer: int | None) -> None:
        nbytes = self._slot_bytes * self._slots
        # Pages come when they are touched, so that an idle agent is small and this takes no time on the loop.
        arena = Arena.create(ArenaKind.PRIVATE, nbytes, populate=False)
        number = self._arenas.adopt(arena, buffer=buffer)
        self._free.extend(
            (number, offset, arena.view[offset : offset + self._slot_bytes])
            for offset in reversed(range(0, nbytes, self._slot_bytes))
        )
