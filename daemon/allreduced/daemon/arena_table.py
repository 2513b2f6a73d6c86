"""All buffers of this agent by number: who owns each, how much of the limits is used, where each lies."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from allreduced.core.errors import AllReducedError, InternalError, InvalidArgument, LimitExceeded
from allreduced.daemon.arena import Arena, ArenaKind
from allreduced.daemon.engine.region import FIRST_ENGINE_BUFFER, Region

logger = logging.getLogger("allreduced.arena")

Created: TypeAlias = "Callable[[int, AllReducedError | None], None]"
"""Called on the loop with the buffer's number and None, or with the error if it could not be made."""


@dataclass(frozen=True, slots=True)
class ArenaLimits:
    """Limits in bytes (``per_client_arenas``: a count). ``inputs`` is below ``total``, so that results find room.

    ``per_user``: inputs of all clients of one user; 0 for no such limit.
    """

    total: int
    inputs: int
    per_client: int
    per_client_arenas: int = 1024
    per_user: int = 0

    @classmethod
    def from_total(cls, total: int) -> ArenaLimits:
        """Return the default split: three quarters of ``total`` for inputs, all of them for one client if need be."""
        inputs = total - total // 4
        return cls(total, inputs, inputs)


@dataclass(slots=True, eq=False)
class _Entry:
    buffer: int
    kind: ArenaKind
    nbytes: int
    owner: int  # a client for inputs and uploads, a group for results, 0 for the engine's own
    of_client: bool
    user: int = 0
    arena: Arena | None = None
    address: int = 0
    holds: int = 0
    dropped: bool = False


class ArenaTable:
    """Makes, numbers, finds and drops buffers. Everything is called on the loop's thread.

    Memory is made and unmapped on one thread of the table's own, for it takes milliseconds. Buffer 0 is the slab of
    small inputs; other inputs are numbered from 1; numbers from ``FIRST_ENGINE_BUFFER`` are given by the engine.
    """

    def __init__(self, limits: ArenaLimits) -> None:
        self.limits = limits
        self._entries: dict[int, _Entry] = {}
        self._numbers = itertools.count(1)
        self._total = 0
        self._inputs = 0
        self._by_kind = dict.fromkeys(ArenaKind, 0)
        self._by_client: dict[int, set[int]] = {}
        self._by_user: dict[int, int] = {}
        """Bytes of the inputs of each user's clients."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="allreduced-arena")
        self._running: set[asyncio.Future[object]] = set()
        self._closed = False
        self.on_room: Callable[[], None] | None = None
        """Called when an input buffer was given back, so that there is more room for others."""

    @property
    def total_bytes(self) -> int:
        """Bytes that are reserved now, all buffers together."""
        return self._total

    @property
    def bytes_by_kind(self) -> dict[ArenaKind, int]:
        """The same, by what the memory is for."""
        return dict(self._by_kind)

    @property
    def input_bytes(self) -> int:
        """Bytes that are reserved for inputs of clients now, shared or not; ``limits.inputs`` bounds them."""
        return self._inputs

    def client_bytes(self, client: int) -> int:
        """Return the bytes that are reserved for ``client`` now."""
        return sum(self._entries[buffer].nbytes for buffer in self._by_client.get(client, ()))

    def user_bytes(self, user: int) -> int:
        """Return the bytes that are reserved for the inputs of the user's clients now."""
        return self._by_user.get(user, 0)

    # Making

    def create_input(self, client: int, nbytes: int, created: Created, *, shared: bool = True, user: int = 0) -> int:
        """Start making an input buffer of ``client`` and return its number; ``created`` follows on the loop.

        ``user``: the uid that the client runs as, whose limit it counts for too. ``shared`` false makes private memory,
        for inputs that come over the socket.

        :raises LimitExceeded: a limit stands in the way; its name is a key of the section ``limits``.
        :raises InvalidArgument: ``nbytes`` is not positive.
        """
        if nbytes < 1:
            raise InvalidArgument(f"an arena must have at least one byte, not {nbytes}")
        self._check_input(client, user, nbytes)
        kind = ArenaKind.INPUT if shared else ArenaKind.PRIVATE
        entry = _Entry(next(self._numbers), kind, nbytes, client, of_client=True, user=user)
        self._by_client.setdefault(client, set()).add(entry.buffer)
        self._start(entry, created)
        return entry.buffer

    def create(self, buffer: int, group: int, nbytes: int, created: Created) -> None:
        """Start making a buffer that the engine numbered: a result arena of ``group``, private if ``group`` is 0.

        ``created`` follows on the loop, also where a limit stands in the way.
        """
        if buffer < FIRST_ENGINE_BUFFER or buffer in self._entries:
            raise ValueError(f"buffer {buffer} is not a new number of the engine's")
        error = self._beyond_total(nbytes)
        if error is not None:
            asyncio.get_running_loop().call_soon(created, buffer, error)
            return
        kind = ArenaKind.RESULT if group else ArenaKind.PRIVATE
        self._start(_Entry(buffer, kind, nbytes, group, of_client=False), created)

    def adopt(self, arena: Arena, *, buffer: int | None = None) -> int:
        """Take over private memory of the agent's own and return its number. Not charged to any client."""
        number = next(self._numbers) if buffer is None else buffer
        entry = _Entry(number, arena.kind, arena.nbytes, 0, of_client=False, arena=arena, address=arena.address)
        self._entries[number] = entry
        self._total += arena.nbytes
        self._by_kind[arena.kind] += arena.nbytes
        return number

    def _check_input(self, client: int, user: int, nbytes: int) -> None:
        limits = self.limits
        if len(self._by_client.get(client, ())) >= limits.per_client_arenas:
            raise LimitExceeded(
                f"this process has {limits.per_client_arenas} input arenas, the most that the agent allows",
                limit="limits.arenas_per_client",
                hint="close arrays from comm.empty() that are not used any more, or raise limits.arenas_per_client",
            )
        for name, used, limit in (
            ("limits.arena_bytes_per_client", self.client_bytes(client), limits.per_client),
            ("limits.arena_bytes", self._inputs, limits.inputs),
            ("limits.arena_bytes_per_user", self.user_bytes(user), limits.per_user or limits.inputs),
        ):
            if used + nbytes > limit:
                raise _too_much(nbytes, used, limit, name)
        error = self._beyond_total(nbytes)
        if error is not None:
            raise error

    def _beyond_total(self, nbytes: int) -> LimitExceeded | None:
        if self._total + nbytes > self.limits.total:
            return _too_much(nbytes, self._total, self.limits.total, "limits.arena_bytes")
        return None

    def _start(self, entry: _Entry, created: Created) -> None:
        self._entries[entry.buffer] = entry
        self._total += entry.nbytes
        self._by_kind[entry.kind] += entry.nbytes
        if entry.of_client:
            self._inputs += entry.nbytes
            self._by_user[entry.user] = self.user_bytes(entry.user) + entry.nbytes
        future = self._in_thread(partial(Arena.create, entry.kind, entry.nbytes))
        future.add_done_callback(partial(self._finish, entry, created))

    def _in_thread(self, work: Callable[[], object]) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().run_in_executor(self._executor, work)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def _finish(self, entry: _Entry, created: Created, future: asyncio.Future[object]) -> None:
        """Take the new memory from the thread, unless nobody wants it any more."""
        if future.cancelled():
            return
        failure = future.exception()
        arena = None if failure is not None else future.result()
        if isinstance(arena, Arena) and (entry.dropped or self._closed):
            arena.close()  # young memory that nobody touched: cheap enough for the loop
        elif isinstance(arena, Arena):
            entry.arena, entry.address = arena, arena.address
            created(entry.buffer, None)
        elif not entry.dropped:
            self._forget(entry)
            if isinstance(failure, AllReducedError):
                created(entry.buffer, failure)
            else:
                logger.error("event=arena_not_made buffer=%d", entry.buffer, exc_info=failure)
                created(entry.buffer, InternalError(f"the agent could not make a buffer: {failure!r}"))

    # Finding

    def address(self, region: Region) -> int:
        """Return where ``region`` begins in memory.

        :raises ValueError: there is no such buffer, or the region does not lie within it.
        """
        buffer, offset, nbytes = region
        entry = self._entries.get(buffer)
        if entry is None or entry.arena is None or offset < 0 or nbytes < 0 or offset + nbytes > entry.nbytes:
            raise ValueError(f"{region} is not within a mapped buffer")
        return entry.address + offset

    def view(self, region: Region) -> memoryview:
        """Return the bytes of ``region`` themselves, writable; release it when done.

        :raises ValueError: there is no such buffer, or the region does not lie within it.
        """
        buffer, offset, nbytes = region
        entry = self._entries.get(buffer)
        if entry is None or entry.arena is None or offset < 0 or nbytes < 0 or offset + nbytes > entry.nbytes:
            raise ValueError(f"{region} is not within a mapped buffer")
        return entry.arena.view[offset : offset + nbytes]

    def descriptor(self, buffer: int) -> int:
        """Return the descriptor of a shared arena, for sending; it stays the table's.

        :raises ValueError: there is no such buffer, or it has no descriptor (any more).
        """
        entry = self._entries.get(buffer)
        if entry is None or entry.arena is None or entry.arena.descriptor is None:
            raise ValueError(f"buffer {buffer} has no descriptor")
        return entry.arena.descriptor

    def descriptor_sent(self, buffer: int) -> None:
        """Close the descriptor of an input arena, which is sent once. Does nothing for a buffer that is gone."""
        entry = self._entries.get(buffer)
        if entry is not None and entry.arena is not None:
            entry.arena.close_descriptor()

    def nbytes(self, buffer: int) -> int:
        """Return the size of a buffer, 0 where there is none."""
        entry = self._entries.get(buffer)
        return entry.nbytes if entry is not None else 0

    def group_of(self, buffer: int) -> int:
        """Return the group of a result arena, 0 for any other buffer."""
        entry = self._entries.get(buffer)
        return entry.owner if entry is not None and entry.kind is ArenaKind.RESULT else 0

    def owns(self, client: int, buffer: int) -> bool:
        """Return whether ``buffer`` is a live shared input arena of ``client``."""
        entry = self._entries.get(buffer)
        return (
            entry is not None
            and entry.kind is ArenaKind.INPUT
            and entry.owner == client
            and entry.arena is not None
            and not entry.dropped
        )

    # Using and dropping

    def hold(self, buffer: int) -> None:
        """Keep a buffer while an operation reads it, whatever its owner does. Undone by :meth:`unhold`."""
        self._entries[buffer].holds += 1

    def unhold(self, buffer: int) -> None:
        """Undo one :meth:`hold`; a buffer that was dropped meanwhile goes with the last one."""
        entry = self._entries[buffer]
        entry.holds -= 1
        if entry.dropped and entry.holds == 0:
            self._forget(entry)

    def drop(self, buffer: int) -> None:
        """Give a buffer up: unmapped as soon as nothing holds it. Unknown numbers are ignored."""
        entry = self._entries.get(buffer)
        if entry is None or entry.dropped:
            return
        entry.dropped = True
        if entry.holds == 0:
            self._forget(entry)

    def drop_client(self, client: int) -> None:
        """Drop every buffer of ``client``."""
        for buffer in tuple(self._by_client.get(client, ())):
            self.drop(buffer)

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.buffer]
        self._total -= entry.nbytes
        self._by_kind[entry.kind] -= entry.nbytes
        if entry.of_client:
            self._inputs -= entry.nbytes
            self._by_user[entry.user] -= entry.nbytes
            if not self._by_user[entry.user]:
                del self._by_user[entry.user]
            mine = self._by_client[entry.owner]
            mine.discard(entry.buffer)
            if not mine:
                del self._by_client[entry.owner]
        if entry.arena is not None and not self._closed:
            self._in_thread(entry.arena.close)
        if entry.of_client and self.on_room is not None:
            self.on_room()

    async def close(self) -> None:
        """Unmap everything, end the thread. Nothing may use any buffer any more."""
        self._closed = True
        while self._running:
            await asyncio.wait(tuple(self._running))
        for entry in tuple(self._entries.values()):
            if entry.arena is not None:
                entry.arena.close()
        self._entries.clear()
        self._by_client.clear()
        self._by_user.clear()
        self._total = self._inputs = 0
        self._by_kind = dict.fromkeys(ArenaKind, 0)
        self._executor.shutdown()  # idle by now, so this does not block


def _too_much(nbytes: int, used: int, limit: int, name: str) -> LimitExceeded:
    return LimitExceeded(
        f"{nbytes} bytes more do not fit: {used} of {limit} bytes are used ({name})",
        limit=name,
        hint=f"use smaller tensors, fewer of them at once, or raise {name}",
    )
