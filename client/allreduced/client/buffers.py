"""Memory shared with the agent: input arenas cut into blocks, and results read under leases.

Lifetimes follow Python references. A :class:`Block` goes back to its arena, and a :class:`Lease` to the agent, when
the last array, view or operation that refers to it is gone. Their ``__del__`` only appends to a deque: they may run
at any moment, in any thread, while any lock is held, or when the interpreter ends.
"""

from __future__ import annotations

import errno
import itertools
import math
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from allreduced.client.arrays import Array
from allreduced.core.errors import LimitExceeded, ProtocolError

MIN_BLOCK = 1024
"""Bytes of the smallest block; all blocks begin at multiples of 256."""

MIN_ARENA = 4 << 20
MAX_GROWTH = 64 << 20
"""Arenas double in size from MIN_ARENA to MAX_GROWTH; a larger tensor gets an arena of its own size."""

KEEP_FREE = 128 << 20
"""Bytes in arenas without any block that are kept for later; more is given back to the agent."""


def block_class(nbytes: int) -> int:
    """Return the size of the block that holds ``nbytes``: a power of two, or 1.25, 1.5 or 1.75 times one."""
    if nbytes <= MIN_BLOCK:
        return MIN_BLOCK
    step = 1 << max((nbytes - 1).bit_length() - 3, 8)
    return -(-nbytes // step) * step


MORE_FILES = "drop views of earlier results, or raise this process's limit on open files (ulimit -n)"
"""What helps where there are no descriptors left."""

_SCARCE = {
    errno.EMFILE: MORE_FILES,
    errno.ENFILE: MORE_FILES,
    errno.ENOMEM: "raise this process's limit on memory (ulimit -v), or use smaller tensors",
    errno.EAGAIN: "raise this process's limit on locked memory (ulimit -l)",
}


class Mapping:
    """A mapped arena. The pages stay mapped as long as anything refers to this object."""

    __slots__ = ("_bytes", "address", "arena", "nbytes", "writable")

    def __init__(self, arena: int, descriptor: int, nbytes: int, *, writable: bool) -> None:
        """Map the descriptor, and close it in every case.

        :raises ProtocolError: it cannot be mapped, or is shorter than ``nbytes``.
        :raises LimitExceeded: this process may have no more descriptors, or no more memory.
        """
        try:
            # Mapping past the end would turn into SIGBUS later; sealed memory cannot shrink after this check.
            if nbytes <= 0 or os.fstat(descriptor).st_size < nbytes:
                raise ProtocolError(f"arena {arena} is said to have {nbytes} bytes, its memory is shorter")
            protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
            mapped = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _SCARCE:
                raise LimitExceeded(
                    f"this process cannot map {nbytes} bytes of shared memory: {error.strerror}",
                    hint=_SCARCE[error.errno],
                ) from error
            raise ProtocolError(f"arena {arena} of {nbytes} bytes cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self.arena = arena
        self.nbytes = nbytes
        self.writable = writable
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        self.address: int = self._bytes.ctypes.data

    def bytes(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return these bytes; the array refers to the mapping and to nothing else."""
        return self._bytes[offset : offset + nbytes]


Return: TypeAlias = "tuple[int, int, int]"
"""A block that came back: its arena's key, offset and size. No reference, so that it keeps nothing mapped."""


IDLE_CALLS = 64
"""Calls after which an arena that none of them used counts as idle."""


class _Stretch:
    """Bytes of a mapping that are somebody's; arrays over them refer to this object."""

    __slots__ = ("mapping", "nbytes", "offset")

    def __init__(self, mapping: Mapping, offset: int, nbytes: int) -> None:
        self.mapping = mapping
        self.offset = offset
        self.nbytes = nbytes

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {
            "version": 3,
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.mapping.address + self.offset, not self.mapping.writable),
        }

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike, *, skip: int = 0) -> Array:
        """Return the elements from byte ``skip`` on as an array. It, and every view of it, keeps this object."""
        kind = np.dtype(dtype)
        end = skip + math.prod(shape) * kind.itemsize
        array: Array = np.asarray(self)[skip:end].view(kind).reshape(shape)
        return array


class Block(_Stretch):
    """A piece of an input arena."""

    __slots__ = ("_home", "_returned", "_size")

    def __init__(self, home: InputArena, offset: int, size: int, nbytes: int, returned: deque[Return]) -> None:
        super().__init__(home.mapping, offset, nbytes)
        self._home = home.key
        self._size = size
        self._returned: deque[Return] | None = returned

    def __del__(self) -> None:
        if self._returned is not None:
            self._returned.append((self._home, self.offset, self._size))
            self._returned = None


class Lease(_Stretch):
    """A result in a result arena, read-only. ``release`` is called once, with the lease, when nothing reads it.

    ``keep`` lives as long: the session, at whose end the agent would use the memory for other results.
    """

    __slots__ = ("_keep", "_release", "lease")

    def __init__(
        self,
        mapping: Mapping,
        offset: int,
        nbytes: int,
        lease: int,
        release: Callable[[int], None],
        keep: object = None,
    ) -> None:
        super().__init__(mapping, offset, nbytes)
        self._keep = keep
        self.lease = lease
        self._release: Callable[[int], None] | None = release

    def __del__(self) -> None:
        release, self._release = self._release, None
        if release is not None and not sys.is_finalizing():
            release(self.lease)


class InputArena:
    """The blocks of one input arena: those that were given back by size, and the part that was never given out."""

    def __init__(self, key: int, mapping: Mapping) -> None:
        self.key = key
        self.mapping = mapping
        self.live = 0
        self.used_at = 0
        """The pool's count of calls when a block was last taken."""
        self._free: dict[int, list[int]] = {}
        self._fresh = 0

    def take(self, size: int) -> int | None:
        """Return the offset of a free block of exactly this class, or None."""
        offsets = self._free.get(size)
        if offsets:
            offset = offsets.pop()
        elif self._fresh + size <= self.mapping.nbytes:
            offset = self._fresh
            self._fresh += size
        else:
            return None
        self.live += 1
        return offset

    def give(self, offset: int, size: int) -> None:
        """Take the block back; when it was the last, the arena is whole again."""
        self.live -= 1
        if self.live == 0:
            self._free.clear()
            self._fresh = 0
        else:
            self._free.setdefault(size, []).append(offset)


class Pool:
    """The input arenas of one session. Not thread-safe but for the return of blocks: the session's lock guards it."""

    def __init__(self) -> None:
        self._arenas: dict[int, InputArena] = {}
        self._keys = itertools.count()
        self._calls = 0
        self._returned: deque[Return] = deque()

    def allocate(self, nbytes: int) -> Block | None:
        """Return a block of at least ``nbytes``, or None: then an arena of :meth:`wanted` bytes is needed first."""
        self._collect()
        size = block_class(nbytes)
        for home in self._arenas.values():
            offset = home.take(size)
            if offset is not None:
                home.used_at = self._calls
                return Block(home, offset, size, nbytes, self._returned)
        return None

    def wanted(self, nbytes: int) -> int:
        """Return the size of the next arena, for a block of ``nbytes``."""
        grown = min(MIN_ARENA << len(self._arenas), MAX_GROWTH)
        return max(block_class(nbytes), grown)

    def add(self, mapping: Mapping) -> None:
        """Use one more arena."""
        key = next(self._keys)
        self._arenas[key] = InputArena(key, mapping)

    def find(self, address: int, nbytes: int) -> Mapping | None:
        """Return the arena in which these bytes lie, or None."""
        for home in self._arenas.values():
            mapping = home.mapping
            if mapping.address <= address and address + nbytes <= mapping.address + mapping.nbytes:
                return mapping
        return None

    def count_call(self) -> list[int]:
        """Take note of one more call; return the arenas to be released because they have long been of no use."""
        self._calls += 1
        return [] if self._calls % IDLE_CALLS else self.surplus(before=self._calls - IDLE_CALLS)

    def surplus(self, keep: int = KEEP_FREE, *, before: int | None = None) -> list[int]:
        """Forget the arenas without blocks beyond ``keep`` bytes, and return their numbers, to be released.

        ``before``: only those that were not used since that many calls.
        """
        self._collect()
        gone: list[int] = []
        for home in sorted(self._arenas.values(), key=lambda home: home.mapping.nbytes):
            if home.live or (before is not None and home.used_at > before):
                continue
            if home.mapping.nbytes <= keep:
                keep -= home.mapping.nbytes
                continue
            del self._arenas[home.key]
            gone.append(home.mapping.arena)
        return gone

    def clear(self) -> None:
        """Forget all arenas. Arrays in them stay valid in this process."""
        self._arenas.clear()

    def _collect(self) -> None:
        while self._returned:
            key, offset, size = self._returned.popleft()
            home = self._arenas.get(key)
            if home is not None:
                home.give(offset, size)
