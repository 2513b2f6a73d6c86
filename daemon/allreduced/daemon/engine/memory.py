"""Arenas of the engine: made, cut up, reused and dropped within the limits.

Result arenas belong to one group. Private arenas (group 0) hold receive windows and small results. Making an arena
takes milliseconds; what is reserved in it meanwhile waits until it is ready. An idle arena is kept for the next
operation and dropped when its memory is needed elsewhere or its group is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from allreduced.daemon.engine.actions import CreateArena, DestroyArena
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.free_list import FreeList, aligned
from allreduced.daemon.engine.region import FIRST_ENGINE_BUFFER, Region

PAGE = 4096
PRIVATE = 0
_TRIES = 8
"""Buffers that may fail, one after the other, while no operation but those that wait for them has memory."""

MAX_GROWTH = 64 << 20
"""Bytes of the largest arena that is made larger than what it is made for."""


class Arena:
    """One buffer; ``ready`` once it exists."""

    __slots__ = ("buffer", "group", "nbytes", "ready", "space")

    def __init__(self, buffer: int, group: int, nbytes: int) -> None:
        self.buffer = buffer
        self.group = group
        self.nbytes = nbytes
        self.ready = False
        self.space = FreeList(nbytes)

    @property
    def idle(self) -> bool:
        """True where nothing is reserved in it."""
        return self.space.free == self.nbytes


class Allocation:
    """Reserved bytes of an arena."""

    __slots__ = ("arena", "nbytes", "offset", "user")

    def __init__(self, arena: Arena, offset: int, nbytes: int, user: int = 0) -> None:
        self.arena = arena
        self.user = user
        self.offset = offset
        self.nbytes = nbytes

    def region(self, offset: int, nbytes: int) -> Region:
        """Return the stretch at ``offset`` of this allocation."""
        return Region(self.arena.buffer, self.offset + offset, nbytes)


class Memory:
    """All arenas of one engine."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._arenas: dict[int, Arena] = {}
        self._by_group: dict[int, list[Arena]] = {PRIVATE: []}
        self._next_buffer = FIRST_ENGINE_BUFFER
        self._total = 0
        self._scratch = 0
        self._ceiling = context.limits.arena_bytes
        """What all arenas may have now: less than the limit where other memory of the agent takes so much of it."""
        self._by_user: dict[int, int] = {}
        """Bytes that the operations of each user hold."""
        self._forgotten: set[int] = set()
        self._unmade = 0
        """Buffers that could not be made since an operation got all that it needs."""

    def never_fits(self, result: int, scratch: int) -> tuple[str, int] | None:
        """Return (setting, bytes) of the limit that the two exceed although nothing else is there, None for none."""
        limits = self._context.limits
        if _pages(scratch) > limits.scratch_bytes or _pages(result) + _pages(scratch) > limits.arena_bytes:
            return "limits.arena_bytes", limits.arena_bytes
        if limits.user_bytes and aligned(result) + aligned(scratch) > limits.user_bytes:
            return "limits.arena_bytes_per_user", limits.user_bytes
        return None

    def beyond_share(self, user: int, result: int, scratch: int) -> bool:
        """Return whether the user's operations hold so much that the two must wait for some of them."""
        most = self._context.limits.user_bytes
        return bool(most) and self._by_user.get(user, 0) + aligned(result) + aligned(scratch) > most

    def reserve(
        self, group: int, result: int, scratch: int, user: int = 0
    ) -> tuple[Allocation | None, Allocation | None] | None:
        """Reserve ``result`` bytes in an arena of ``group`` and ``scratch`` private ones, both or (None) nothing.

        ``user``: whose operation it is for. Nothing is made or dropped where it returns None.
        """
        result, scratch = aligned(result), aligned(scratch)
        for reuse_idle in (True, False):
            small = self._take(PRIVATE, scratch, reuse_idle) if scratch else None
            large = self._take(group, result, reuse_idle) if result else None
            new_small = _pages(scratch) if small is None else 0
            new_large = _pages(result) if large is None else 0
            if new_small or new_large:
                if not self._can_make(new_small, new_large):
                    for taken in (small, large):
                        if taken is not None:
                            taken.arena.space.give(taken.offset, taken.nbytes)
                    continue
                if new_small:
                    small = self._create(PRIVATE, scratch, new_large)
                if new_large:
                    large = self._create(group, result, 0)
            for allocation in (large, small):
                if allocation is not None:
                    allocation.user = user
                    self._by_user[user] = self._by_user.get(user, 0) + allocation.nbytes
            return large, small
        return None

    def release(self, allocation: Allocation) -> None:
        """Give reserved bytes back."""
        arena = allocation.arena
        arena.space.give(allocation.offset, allocation.nbytes)
        self._by_user[allocation.user] -= allocation.nbytes
        if not self._by_user[allocation.user]:
            del self._by_user[allocation.user]
        self._context.freed = True
        if arena.group in self._forgotten and arena.ready and arena.idle:
            self._drop(arena)

    def arena_ready(self, buffer: int) -> None:
        """Take note that the buffer exists."""
        arena = self._arenas.get(buffer)
        if arena is not None:
            arena.ready = True
            self._context.freed = True
            if arena.group in self._forgotten and arena.idle:
                self._drop(arena)

    def served(self) -> None:
        """Take note that all the buffers of an operation exist."""
        self._unmade = 0

    def lower(self, buffer: int, waiting: Iterable[Allocation]) -> bool:
        """Take note that there was no room for this buffer; True where the engine's other memory can make some.

        ``waiting``: what the operations hold that wait for the buffer. Until :meth:`raise_ceiling` no more is taken
        than is there without it.
        """
        arena = self._arenas.get(buffer)
        if arena is None or len(self._arenas) == 1:
            return False
        self._unmade += 1
        if self._unmade > _TRIES and not self._held_by_others(arena, waiting):
            return False
        self._ceiling = self._total - arena.nbytes
        return True

    def _held_by_others(self, missing: Arena, waiting: Iterable[Allocation]) -> bool:
        """Tell whether somebody else has memory, and will give it back.

        What is still to be made may fail as well: then each would be tried again for the sake of the other.
        """
        own: dict[int, int] = {}
        for allocation in waiting:
            own[allocation.arena.buffer] = own.get(allocation.arena.buffer, 0) + allocation.nbytes
        return any(
            arena.ready and arena.nbytes - arena.space.free > own.get(arena.buffer, 0)
            for arena in self._arenas.values()
            if arena is not missing
        )

    def raise_ceiling(self) -> None:
        """Take note that the agent needs less memory for other things: there may be room again."""
        if self._ceiling != self._context.limits.arena_bytes:
            self._ceiling = self._context.limits.arena_bytes
            self._context.freed = True

    def arena_failed(self, buffer: int) -> None:
        """Take note that the buffer will never exist. What was reserved in it must have been released before."""
        arena = self._arenas.get(buffer)
        if arena is not None:
            self._remove(arena)
            self._context.freed = True

    def forget(self, group: int) -> None:
        """Drop the arenas of a group, each as soon as nothing is reserved in it."""
        if group not in self._by_group:
            return
        self._forgotten.add(group)
        for arena in list(self._by_group[group]):
            if arena.ready and arena.idle:
                self._drop(arena)

    def drop_idle(self) -> None:
        """Drop every arena in which nothing is reserved."""
        for arena in list(self._arenas.values()):
            if arena.ready and arena.idle:
                self._drop(arena)

    @property
    def reserved(self) -> int:
        """Bytes reserved in all arenas."""
        return sum(arena.nbytes - arena.space.free for arena in self._arenas.values())

    def snapshot(self) -> dict[str, int]:
        """Return what ``status`` shows of the memory, in bytes."""
        return {
            "arenas": len(self._arenas),
            "arena_bytes": self._total,
            "scratch_bytes": self._scratch,
            "reserved_bytes": self.reserved,
        }

    def _take(self, group: int, nbytes: int, reuse_idle: bool) -> Allocation | None:
        for arena in self._by_group.get(group, ()):
            if arena.space.free >= nbytes and (reuse_idle or not arena.idle):
                offset = arena.space.take(nbytes)
                if offset >= 0:
                    return Allocation(arena, offset, nbytes)
        return None

    def _can_make(self, private: int, result: int) -> bool:
        """Return whether arenas of these sizes have room once the idle ones are dropped."""
        limits = self._context.limits
        idle_private = idle_result = 0
        in_use = False
        for arena in self._arenas.values():
            if arena.ready and arena.idle:
                if arena.group == PRIVATE:
                    idle_private += arena.nbytes
                else:
                    idle_result += arena.nbytes
            else:
                in_use = True
        # Where nothing is in use, nothing would make room either: whether there is enough is found out by trying.
        most = self._ceiling if in_use else limits.arena_bytes
        return (
            not private or self._scratch - idle_private + private <= limits.scratch_bytes
        ) and self._total - idle_private - idle_result + private + result <= most

    def _create(self, group: int, nbytes: int, also: int) -> Allocation:
        """Make an arena for ``nbytes``, of a comfortable size if that leaves ``also`` bytes; drop idle ones for it."""
        private = group == PRIVATE
        # The more a group has, the larger its next arena: each one costs a descriptor, and a mapping in each client.
        have = sum(arena.nbytes for arena in self._by_group.get(group, ()))
        grown = min(MAX_GROWTH, 1 << (have // 4).bit_length() >> 1)
        exact = _pages(nbytes)
        # A power of two may be nearly twice as much, which large tensors must not cost.
        rounded = 1 << (nbytes - 1).bit_length() if nbytes <= MAX_GROWTH else exact
        generous = max(rounded, self._context.limits.arena_chunk, grown)
        size = generous if self._room(private) >= generous and self._room(False) >= generous + also else exact
        for arena in list(self._arenas.values()):
            if self._room(private) >= exact and self._room(False) >= exact + also:
                break
            # An idle result arena does not help where only the share of the private ones is used up.
            useful = arena.group == PRIVATE or self._room(False) < exact + also
            if arena.ready and arena.idle and useful:
                self._drop(arena)
        arena = Arena(self._next_buffer, group, size)
        self._next_buffer += 1
        self._arenas[arena.buffer] = arena
        self._by_group.setdefault(group, []).append(arena)
        self._total += size
        self._scratch += size if private else 0
        self._context.out.append(CreateArena(arena.buffer, group, size))
        return Allocation(arena, arena.space.take(nbytes), nbytes)

    def _room(self, private: bool) -> int:
        """Return the bytes that new arenas may have; for private ones also within their share."""
        room = self._ceiling - self._total
        return min(room, self._context.limits.scratch_bytes - self._scratch) if private else room

    def _drop(self, arena: Arena) -> None:
        self._remove(arena)
        self._context.out.append(DestroyArena(arena.buffer))

    def _remove(self, arena: Arena) -> None:
        del self._arenas[arena.buffer]
        siblings = self._by_group[arena.group]
        siblings.remove(arena)
        self._total -= arena.nbytes
        self._scratch -= arena.nbytes if arena.group == PRIVATE else 0
        if not siblings and arena.group != PRIVATE:
            del self._by_group[arena.group]
            self._forgotten.discard(arena.group)


def _pages(nbytes: int) -> int:
    return (nbytes + PAGE - 1) // PAGE * PAGE
