"""A stretch of memory that the agent maps: shared with clients by descriptor, or private to the agent."""

from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import logging
import mmap
import os
from typing import Self

from allreduced.core.errors import LimitExceeded
from allreduced.daemon.memory_share import available_memory

logger = logging.getLogger("allreduced.arena")

# Neither the fcntl nor the mmap module of Python 3.11 names these two.
_SEAL_FUTURE_WRITE = 0x0010
_MADV_POPULATE_WRITE = 23

_LARGE = 16 << 20
"""Bytes from which on an arena is worth a look at what the machine has."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


class ArenaKind(enum.Enum):
    """Who may do what with an arena."""

    INPUT = "input"
    """One client maps it writable; the agent only reads it."""
    RESULT = "result"
    """The agent writes; clients can map it read-only, and nothing else."""
    PRIVATE = "private"
    """Anonymous memory of the agent, seen by nobody else."""


class Arena:
    """Mapped memory of fixed size, all pages present from the start.

    ``address`` is where the mapping begins, ``view`` its bytes. Shared arenas have a ``descriptor`` (a sealed memfd
    without a name, so that nothing is left behind whatever dies) until :meth:`close_descriptor`.
    """

    __slots__ = ("_map", "address", "descriptor", "kind", "nbytes", "view")

    def __init__(self, kind: ArenaKind, nbytes: int, mapping: mmap.mmap, descriptor: int | None) -> None:
        self.kind = kind
        self.nbytes = nbytes
        self.descriptor = descriptor
        self._map: mmap.mmap | None = mapping
        self.view = memoryview(mapping)
        first = ctypes.c_char.from_buffer(mapping)
        self.address = ctypes.addressof(first)

    @classmethod
    def create(cls, kind: ArenaKind, nbytes: int, *, populate: bool = True) -> Self:
        """Allocate, map and seal ``nbytes`` (at least 1). Takes about 0.5 ms per MiB: call it off the loop.

        The thread does not hold the GIL meanwhile. ``populate`` false leaves private pages to be made when touched.

        :raises LimitExceeded: the machine or the control group has no memory or no descriptor left for it.
        """
        if nbytes < 1:
            raise ValueError(f"an arena has at least one byte, not {nbytes}")
        try:
            _check_available(nbytes)
            if kind is ArenaKind.PRIVATE:
                return cls._create_private(nbytes, populate=populate)
            return cls._create_shared(kind, nbytes)
        except (OSError, ValueError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            descriptors = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
            raise LimitExceeded(
                f"the agent cannot get {nbytes} bytes of {kind.value} memory: {reason}",
                limit="descriptors" if descriptors else "memory",
                hint="drop views of earlier results, or raise the agent's limit on open files (ulimit -n)"
                if descriptors
                else "free memory on this node, raise the control group's memory limit or use smaller tensors",
            ) from error

    @classmethod
    def _create_private(cls, nbytes: int, *, populate: bool) -> Self:
        mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        arena = cls(ArenaKind.PRIVATE, nbytes, mapping, None)
        if populate:
            _populate(arena)
        return arena

    @classmethod
    def _create_shared(cls, kind: ArenaKind, nbytes: int) -> Self:
        descriptor = os.memfd_create(f"allreduced-{kind.value}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            if kind is ArenaKind.RESULT:
                seals |= _SEAL_FUTURE_WRITE  # this agent's mapping is there already and stays writable
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            arena = cls(kind, nbytes, mapping, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        _populate(arena)
        return arena

    def close_descriptor(self) -> None:
        """Close the descriptor; the memory stays mapped here and wherever it was sent. Idempotent."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def close(self) -> None:
        """Unmap. Where somebody still holds a view, the mapping goes with the last view. Idempotent."""
        self.close_descriptor()
        mapping, self._map = self._map, None
        if mapping is None:
            return
        self.view.release()
        try:
            mapping.close()
        except BufferError:
            logger.debug("event=arena_kept_by_view kind=%s nbytes=%d", self.kind.value, self.nbytes)


def _check_available(nbytes: int) -> None:
    """Refuse what the machine does not have: the kernel would not, it would kill processes to find the memory."""
    if nbytes < _LARGE:
        return
    available = available_memory()
    if available is not None and nbytes > available:
        raise OSError(errno.ENOMEM, f"only {available} bytes are available on this machine")


def _populate(arena: Arena) -> None:
    """Make every page present and writable, so that neither kernels nor links fault later.

    ``MAP_POPULATE`` would do the same with the GIL held. Kernels before 5.14 do not know the advice; there, and where
    it fails otherwise, pages of a shared arena exist anyway and are only mapped later.
    """
    if _libc.madvise(arena.address, arena.nbytes, _MADV_POPULATE_WRITE) != 0:
        error = ctypes.get_errno()
        logger.debug(
            "event=arena_not_populated kind=%s nbytes=%d error=%r", arena.kind.value, arena.nbytes, os.strerror(error)
        )
