"""How the input of an operation gets to the agent: inside its message, by an arena, or in pieces over the socket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from allreduced.client.arrays import Array
from allreduced.client.buffers import Block, Mapping, Pool, block_class
from allreduced.client.operation import Part
from allreduced.client.outbox import Outbox
from allreduced.core.errors import AllReducedError, LimitExceeded, ProtocolError
from allreduced.protocol.local import CHUNK, AllocateArena, ArenaGranted, ReleaseArena, Upload, encode


@dataclass(slots=True)
class ArenaRequest:
    """An AllocateArena on its way. ``block`` or ``error`` is set when it is answered."""

    nbytes: int
    block_bytes: int
    retried: bool = False
    done: bool = False
    block: Block | None = None
    error: AllReducedError | None = None


class Input(NamedTuple):
    """Where an input is, in the words of Submit. By default there is none."""

    payload: bytes | None = None
    arena: int = -1
    offset: int = 0
    upload: bool = False


_NOTHING = Input()
_PIECES = Input(upload=True)


class Staging:
    """The input arenas of one connection, and the requests for further ones.

    ``shared_memory`` false: inputs that do not fit into messages go in pieces.
    """

    def __init__(self, outbox: Outbox, *, shared_memory: bool) -> None:
        self._outbox = outbox
        self._shared_memory = shared_memory
        self._pool = Pool()
        self._requests: dict[int, ArenaRequest] = {}
        self._waiting: ArenaRequest | None = None
        """What the operation whose turn it is waits for."""

    def allocate(self, nbytes: int) -> ArenaRequest:
        """Ask for a block of shared memory; the request is done now, or when the agent has answered."""
        request = ArenaRequest(0, nbytes)
        request.block = self._pool.allocate(nbytes)
        request.done = request.block is not None
        if not request.done:
            self._ask(request)
        return request

    def place(self, part: Part, inline_limit: int) -> Input | None:
        """Bring the input to where the agent finds it; None where that must wait for an arena that is on its way.

        ``part.hold`` keeps shared memory from being used again. An upload follows the submit, see :func:`pieces`.
        """
        for idle in self._pool.count_call():
            self._outbox.send(ReleaseArena(idle))
        sources, nbytes = part.sources, part.signature.nbytes
        if not sources or not nbytes:
            return _NOTHING
        if nbytes <= inline_limit:
            return Input(sources[0].tobytes() if len(sources) == 1 else b"".join([one.tobytes() for one in sources]))
        if not self._shared_memory:
            return _PIECES
        found = self._find(part)
        if found is not None:
            part.hold = part.sources
            return found
        block = self._stage(nbytes)
        if block is not None:
            _gather(part, block.array((part.signature.count,), part.signature.storage))
            part.hold = block
            return Input(arena=block.mapping.arena, offset=block.offset)
        if self._waiting is not None:
            return None
        # No arena to be had. The agent must still see the operation, or unnamed ones would shift against those of
        # other ranks: it comes in pieces, and the agent says what it thinks of it.
        return _PIECES

    def granted(self, message: ArenaGranted, descriptor: int) -> None:
        """Take an arena that the agent grants; closes the descriptor.

        Where this process has no room for it, it is given back, and the request has failed.

        :raises ProtocolError: it was not asked for, or cannot be mapped.
        """
        request = self._requests.get(message.request)
        try:
            mapping = Mapping(message.arena, descriptor, message.nbytes, writable=True)
        except LimitExceeded as error:
            self._outbox.send(ReleaseArena(message.arena))
            if request is not None:
                del self._requests[message.request]
                request.error, request.done = error, True
            return
        if request is None or message.nbytes < request.nbytes:
            raise ProtocolError(f"the agent granted arena {message.arena}, which was not asked for")
        del self._requests[message.request]
        self._pool.add(mapping)
        request.block = self._pool.allocate(request.block_bytes)
        request.done = True

    def refused(self, number: int, error: AllReducedError) -> bool:
        """Take the refusal of an arena; return False where the request was for none."""
        request = self._requests.pop(number, None)
        if request is None:
            return False
        if request.retried:
            request.error, request.done = error, True
        else:
            # Once more, without what is kept for later and for no more than is needed now.
            request.retried = True
            self._ask(request, frugal=True)
        return True

    def fail(self, error: AllReducedError) -> None:
        """End all requests with ``error`` and forget the arenas; arrays in them stay valid in this process."""
        for request in self._requests.values():
            request.error, request.done = error, True
        self._requests.clear()
        self._pool.clear()

    def _find(self, part: Part) -> Input | None:
        """Return where the sources are, if they lie in one arena, one after the other."""
        start = end = -1
        for source in part.sources:
            if source.size == 0:
                continue
            if not source.flags.c_contiguous:
                return None
            address: int = source.__array_interface__["data"][0]
            if start >= 0 and address != end:
                return None
            start = address if start < 0 else start
            end = address + source.nbytes
        mapping = self._pool.find(start, end - start)
        if mapping is None or (start - mapping.address) % part.signature.dtype.itemsize:
            return None
        return Input(arena=mapping.arena, offset=start - mapping.address)

    def _stage(self, nbytes: int) -> Block | None:
        """Return a block, or None: then an arena is on the way, unless the agent refused one just now."""
        request = self._waiting
        if request is not None:
            if not request.done:
                return None
            self._waiting = None
            if request.error is not None:
                return None
            request.block = None
        block = self._pool.allocate(nbytes)
        if block is None:
            self._waiting = ArenaRequest(0, nbytes)
            self._ask(self._waiting)
        return block

    def release_idle(self) -> None:
        """Give all arenas back that are only kept for later."""
        for arena in self._pool.surplus(0):
            self._outbox.send(ReleaseArena(arena))

    def _ask(self, request: ArenaRequest, *, frugal: bool = False) -> None:
        for arena in self._pool.surplus(0) if frugal else self._pool.surplus():
            self._outbox.send(ReleaseArena(arena))
        request.nbytes = block_class(request.block_bytes) if frugal else self._pool.wanted(request.block_bytes)
        number = self._outbox.next_request()
        self._requests[number] = request
        self._outbox.send(AllocateArena(number, request.nbytes))


def pieces(part: Part) -> Iterator[bytes]:
    """Yield the part's input as Upload messages of at most CHUNK bytes, made when they can leave.

    No more than that is copied at a time, whatever the layout of the input.
    """
    request, sources = part.request, part.sources
    part.sources = ()
    ready: list[bytes] = []
    size = 0
    for source in sources:
        for stretch in _stretches(source, max(CHUNK // source.itemsize, 1)):
            if size + stretch.nbytes > CHUNK:
                yield encode(Upload(request, b"".join(ready)))
                ready, size = [], 0
            ready.append(stretch.tobytes())
            size += stretch.nbytes
    yield encode(Upload(request, b"".join(ready)))


def _stretches(array: Array, most: int) -> Iterator[Array]:
    """Yield the elements of the array in their order, in arrays of at most ``most`` elements."""
    if array.size <= most:
        if array.size:
            yield array
    elif array.flags.c_contiguous:
        flat = array.reshape(-1)
        for start in range(0, flat.size, most):
            yield flat[start : start + most]
    elif (row := array.size // len(array)) > most:
        for part in array:
            yield from _stretches(part, most)
    else:
        for start in range(0, len(array), most // row):
            yield array[start : start + most // row]


def _gather(part: Part, target: Array) -> None:
    """Copy the sources one after the other into the flat ``target``."""
    offset = 0
    for source in part.sources:
        np.copyto(target[offset : offset + source.size].reshape(source.shape), source)
        offset += source.size
