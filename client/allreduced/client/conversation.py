"""The client's side of the local plane, without IO: what to send, and what an answer means.

A session feeds it the bytes and descriptors that arrive and sends what :meth:`Conversation.output` returns. It is not
thread-safe: the session's lock, or its event loop, guards it. Only ``returned`` is touched from elsewhere.
"""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from allreduced.client.arrays import Array
from allreduced.client.buffers import Block, Lease, Mapping, Pool, block_class
from allreduced.client.operation import Operation, Outcome, Part
from allreduced.core.errors import AllReducedError, ClosedError, InvalidArgument, ProtocolError, from_wire
from allreduced.protocol.framing import MessageReader
from allreduced.protocol.local import (
    CHUNK,
    HIGHEST_VERSION,
    LOWEST_VERSION,
    MAX_LEASES,
    MAX_MESSAGE,
    WITH_DESCRIPTOR,
    AllocateArena,
    ArenaGranted,
    Done,
    Download,
    GroupEnded,
    Hello,
    Join,
    Joined,
    Leave,
    Refused,
    ReleaseArena,
    ReleaseLeases,
    RequestFailed,
    ResultArena,
    ResultArenaGone,
    Submit,
    ToAgent,
    ToClient,
    Upload,
    Welcome,
    decode_to_client,
    encode,
)

MAX_DESCRIPTORS = 16
"""Descriptors that may wait for their messages; an agent that sends more breaks the protocol."""

GATHER = 64
"""Pieces of output that are handed out at a time."""


@dataclass(slots=True)
class ArenaRequest:
    """An AllocateArena on its way. ``block`` or ``error`` is set when it is answered."""

    nbytes: int
    block_bytes: int
    retried: bool = False
    done: bool = False
    block: Block | None = None
    error: AllReducedError | None = None


class Conversation:
    """One connection to an agent, from Hello to the end."""

    def __init__(self, *, shared_memory: bool = True) -> None:
        self.shared_memory = shared_memory
        self.welcome: Welcome | None = None
        self.joined: Joined | None = None
        self.error: AllReducedError | None = None
        """Why nothing more can be done with this connection."""
        self.join_error: AllReducedError | None = None
        self.group_error: AllReducedError | None = None
        self.completed: list[tuple[Part, Outcome]] = []
        """Parts that ended well and whose results the session has not taken yet, see :meth:`finish`."""
        self.returned: deque[int] = deque()
        """Leases that nothing reads any more. Appending to it is safe from anywhere."""
        self.leased = 0
        """Leases that the agent has not been told to be free."""
        self.on_release: Callable[[], None] | None = None
        self.owner: Callable[[], object] | None = None
        """Returns what must live as long as any lease: the connection, whose end would give all leases back."""
        self._pool = Pool()
        self._results: dict[int, Mapping] = {}
        self._pending: dict[int, Part] = {}
        self._backlog: deque[Part] = deque()
        self._arena_requests: dict[int, ArenaRequest] = {}
        self._backlog_request: ArenaRequest | None = None
        self._reader = MessageReader(MAX_MESSAGE)
        self._descriptors: deque[int] = deque()
        self._queue: deque[bytes | Iterator[bytes]] = deque()
        self._ready: deque[memoryview] = deque()
        self._next_request = 0
        self._join_request = 0

    # What the session wants

    def hello(self) -> None:
        """Begin the conversation."""
        self._send(Hello(LOWEST_VERSION, HIGHEST_VERSION, os.getpid(), self.shared_memory))

    def join(
        self, *, job: str, group: str, rank: int, size: int, local_rank: int, deadline: float, default_deadline: float
    ) -> None:
        """Ask for a rank of a group; ``joined`` or ``join_error`` will be set."""
        self._join_request = self._request()
        self._send(Join(self._join_request, job, group, rank, size, local_rank, deadline, default_deadline))

    def submit(self, operation: Operation) -> None:
        """Start an operation. Its parts leave in the order of the calls, also where one waits for an arena.

        :raises AllReducedError: the connection or the group has ended.
        """
        self.check()
        self._flush_returned()  # first: the agent may need that memory for this very call
        self._backlog.extend(operation.parts)
        self.advance()

    def check(self) -> None:
        """Return if operations can be started.

        :raises AllReducedError: the connection or the group has ended.
        """
        error = self.error or self.group_error
        if error is not None:
            raise copy.copy(error)  # a stored error must not collect the frames of its raisers

    def allocate(self, nbytes: int) -> ArenaRequest:
        """Ask for a block of shared memory; the request is done now, or when the agent has answered."""
        request = ArenaRequest(0, nbytes)
        request.block = self._pool.allocate(nbytes)
        request.done = request.block is not None
        if not request.done:
            self._ask_for_arena(request)
        return request

    def leave(self) -> None:
        """Tell the agent that this rank leaves on purpose; end everything that is still pending here."""
        if self.error is None:
            if self.joined is not None and self.group_error is None:
                self._send(Leave(self.joined.group))
            self.fail(ClosedError("the communicator was closed"))

    def fail(self, error: AllReducedError) -> None:
        """End everything that is pending, and whatever comes later, with ``error``."""
        if self.error is not None:
            return
        self.error = error
        parts = [*self._pending.values(), *self._backlog]
        self._pending.clear()
        self._backlog.clear()
        for part in parts:
            part.operation.part_failed(part, error)
        for request in self._arena_requests.values():
            request.error, request.done = error, True
        self._arena_requests.clear()
        self._results.clear()
        self._pool.clear()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popleft())

    @property
    def waiting(self) -> bool:
        """True while calls are held up because an earlier one waits for an arena."""
        return bool(self._backlog)

    # Output

    @property
    def has_output(self) -> bool:
        """True while there is something to send."""
        return bool(self._ready or self._queue or self.returned)

    def output(self) -> list[memoryview]:
        """Return the next pieces to send; tell :meth:`sent` how much of them went out."""
        if self.returned:
            self._flush_returned()
        while self._queue and len(self._ready) < GATHER:
            head = self._queue[0]
            if isinstance(head, bytes):
                self._queue.popleft()
                self._ready.append(memoryview(head))
                continue
            if self._ready:
                break  # pieces of an upload are large: made one at a time, when they can leave
            piece = next(head, None)
            if piece is None:
                self._queue.popleft()
            else:
                self._ready.append(memoryview(piece))
        return list(self._ready)

    def sent(self, nbytes: int) -> None:
        """Forget the first ``nbytes`` of the output."""
        while nbytes:
            head = self._ready[0]
            if nbytes < len(head):
                self._ready[0] = head[nbytes:]
                return
            nbytes -= len(head)
            self._ready.popleft()

    def discard_output(self) -> None:
        """Forget the output: nobody takes it any more."""
        self.returned.clear()
        self.leased = 0
        self._queue.clear()
        self._ready.clear()

    # Input

    def feed(self, data: memoryview | bytes, descriptors: Sequence[int] = ()) -> None:
        """Take what arrived. What ended well is in ``completed``; what failed has ended.

        :raises ProtocolError: the agent broke the protocol; the session must call :meth:`fail`.
        """
        self._descriptors.extend(descriptors)
        for body in self._reader.feed(data):
            if self.error is not None:
                break
            message = decode_to_client(body)
            descriptor = -1
            if isinstance(message, WITH_DESCRIPTOR):
                if not self._descriptors:
                    raise ProtocolError(f"the agent sent {type(message).__name__} without its descriptor")
                descriptor = self._descriptors.popleft()
            self._handle(message, descriptor)
        if len(self._descriptors) > MAX_DESCRIPTORS:
            raise ProtocolError(f"the agent sent {len(self._descriptors)} descriptors without their messages")
        if self.error is not None:
            self._close_descriptors()
        self.advance()

    def _handle(self, message: ToClient, descriptor: int) -> None:
        if isinstance(message, ArenaGranted):
            self._on_granted(message, descriptor)
        elif isinstance(message, ResultArena):
            self._on_result_arena(message, descriptor)
        elif isinstance(message, Refused):
            self.fail(from_wire(message.error))
        elif isinstance(message, Welcome):
            self._on_welcome(message)
        elif self.welcome is None:
            raise ProtocolError(f"the agent sent {type(message).__name__} before Welcome")
        elif isinstance(message, Done):
            self._on_done(message)
        elif isinstance(message, Download):
            self._on_download(message)
        elif isinstance(message, RequestFailed):
            self._on_failed(message)
        elif isinstance(message, Joined):
            self._on_joined(message)
        elif isinstance(message, ResultArenaGone):
            self._results.pop(message.arena, None)
        elif isinstance(message, GroupEnded):
            if self.joined is None or message.group != self.joined.group:
                raise ProtocolError(f"the agent ended group {message.group}, which this client is not in")
            self.group_error = from_wire(message.error)

    def _on_welcome(self, message: Welcome) -> None:
        if self.welcome is not None:
            raise ProtocolError("the agent sent Welcome twice")
        if not LOWEST_VERSION <= message.version <= HIGHEST_VERSION:
            raise ProtocolError(f"the agent chose version {message.version}, which was not offered")
        self.welcome = message

    def _on_joined(self, message: Joined) -> None:
        if self.joined is not None or message.request != self._join_request:
            raise ProtocolError("the agent sent Joined without being asked")
        if not 0 <= message.rank < message.size or not 0 <= message.node < len(message.nodes):
            raise ProtocolError("the agent sent a Joined whose rank or node is not in the group")
        if message.rank not in message.nodes[message.node][1]:
            raise ProtocolError(f"the agent sent a Joined whose node lacks rank {message.rank}")
        self.joined = message

    def _on_granted(self, message: ArenaGranted, descriptor: int) -> None:
        mapping = Mapping(message.arena, descriptor, message.nbytes, writable=True)
        request = self._arena_requests.get(message.request)
        if request is None or message.nbytes < request.nbytes:
            raise ProtocolError(f"the agent granted arena {message.arena}, which was not asked for")
        del self._arena_requests[message.request]
        self._pool.add(mapping)
        request.block = self._pool.allocate(request.block_bytes)
        request.done = True

    def _on_result_arena(self, message: ResultArena, descriptor: int) -> None:
        mapping = Mapping(message.arena, descriptor, message.nbytes, writable=False)
        if message.arena in self._results:
            raise ProtocolError(f"the agent sent result arena {message.arena} twice")
        self._results[message.arena] = mapping

    def _on_failed(self, message: RequestFailed) -> None:
        error = from_wire(message.error)
        if message.request == self._join_request and self.joined is None:
            self.join_error = error
            return
        request = self._arena_requests.pop(message.request, None)
        if request is not None:
            if request.retried:
                request.error, request.done = error, True
            else:
                # Once more, without what is kept for later and for no more than is needed now.
                request.retried = True
                self._ask_for_arena(request, frugal=True)
            return
        part = self._find(message.request, "RequestFailed")
        del self._pending[part.request]
        part.operation.part_failed(part, error)

    def _on_done(self, message: Done) -> None:
        part = self._find(message.request, "Done")
        if part.download is not None:
            raise ProtocolError(f"the agent sent Done for request {message.request} twice")
        participants = message.participants or self._all_ranks()
        outcome = Outcome(None, False, None, participants, message.algorithm, message.elapsed)
        if message.pieces:
            part.head = outcome
            part.download = np.empty(part.count, part.dtype.storage)
            return
        if message.payload is not None:
            if len(message.payload) != part.nbytes:
                raise ProtocolError(f"the agent sent a result of {len(message.payload)} bytes for {part.nbytes}")
            data: Array = np.frombuffer(message.payload, part.dtype.storage)
            outcome = Outcome(data, False, None, participants, message.algorithm, message.elapsed)
        elif message.arena >= 0:
            mapping = self._results.get(message.arena)
            if mapping is None:
                raise ProtocolError(f"the agent sent a result in arena {message.arena}, which it did not send")
            if message.nbytes != part.nbytes or message.offset + message.nbytes > mapping.nbytes:
                raise ProtocolError(f"the agent sent a result outside arena {message.arena}, or of a wrong size")
            keep = self.owner() if self.owner is not None else None
            lease = Lease(mapping, message.offset, message.nbytes, message.lease, self._release, keep)
            self.leased += 1
            data = lease.array((part.count,), part.dtype.storage)
            outcome = Outcome(data, False, lease, participants, message.algorithm, message.elapsed)
        elif part.nbytes:
            raise ProtocolError(f"the agent sent no result for an operation of {part.nbytes} bytes")
        elif part.sinks:
            empty: Array = np.empty(0, part.dtype.storage)
            outcome = Outcome(empty, True, None, participants, message.algorithm, message.elapsed)
        del self._pending[part.request]
        self.completed.append((part, outcome))

    def _on_download(self, message: Download) -> None:
        part = self._pending.get(message.request)
        if part is None or part.download is None or part.head is None:
            raise ProtocolError(f"the agent sent a piece of request {message.request}, which expects none")
        target = part.download.view(np.uint8)
        end = part.downloaded + len(message.data)
        if end > part.nbytes or message.last != (end == part.nbytes):
            raise ProtocolError(f"the agent sent pieces that do not make {part.nbytes} bytes")
        target[part.downloaded : end] = np.frombuffer(message.data, np.uint8)
        part.downloaded = end
        if message.last:
            del self._pending[message.request]
            head = part.head
            outcome = Outcome(part.download, True, None, head.participants, head.algorithm, head.elapsed)
            part.download = None
            self.completed.append((part, outcome))

    def _find(self, request: int, what: str) -> Part:
        part = self._pending.get(request)
        if part is None:
            raise ProtocolError(f"the agent sent {what} for request {request}, which is not pending")
        return part

    def _all_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.joined.size)) if self.joined is not None else ()

    def _release(self, lease: int) -> None:
        self.returned.append(lease)
        if self.on_release is not None:
            self.on_release()

    # Parts

    def advance(self) -> None:
        """Send the parts whose turn it is, until one needs an arena that is not there yet."""
        while self._backlog and self._begin(self._backlog[0]):
            self._backlog.popleft()

    def _begin(self, part: Part) -> bool:
        """Send the part and return True, or ask for an arena and return False."""
        if self.joined is None or self.welcome is None:
            raise InvalidArgument("the communicator has not joined its group")
        for idle in self._pool.count_call():
            self._send(ReleaseArena(idle))
        payload: bytes | None = None
        arena, offset, upload = -1, 0, False
        if part.sources and part.nbytes:
            if part.nbytes <= self.welcome.inline_limit:
                payload = b"".join(source.tobytes() for source in part.sources)
            elif not self.shared_memory:
                upload = True
            elif (place := self._in_arena(part)) is not None:
                arena, offset = place
                part.hold = part.sources
            elif (block := self._stage(part.nbytes)) is not None:
                _gather(part, block.array((part.count,), part.dtype.storage))
                arena, offset = block.mapping.arena, block.offset
                part.hold = block
            elif self._backlog_request is not None:
                return False
            else:
                # No arena to be had. The agent must still see the operation, or unnamed ones would shift against
                # those of other ranks: it comes in pieces, and the agent says what it thinks of it.
                upload = True
        part.request = self._request()
        self._pending[part.request] = part
        operation = part.operation
        self._send(
            Submit(
                request=part.request,
                group=self.joined.group,
                kind=part.kind,
                name=part.name,
                dtype=int(part.dtype),
                op=int(part.reduction),
                shape=part.shape,
                count=part.count,
                root=part.root,
                priority=operation.priority,
                deadline=operation.deadline,
                algorithm=operation.algorithm,
                payload=payload,
                arena=arena,
                offset=offset,
                upload=upload,
                inline_result=not self.shared_memory,
            )
        )
        if upload:
            self._queue.append(_pieces(part))
        else:
            part.sources = ()
        return True

    def _in_arena(self, part: Part) -> tuple[int, int] | None:
        """Return arena and offset if the sources lie in one arena, one after the other."""
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
        if mapping is None or (start - mapping.address) % part.dtype.itemsize:
            return None
        return mapping.arena, start - mapping.address

    def _stage(self, nbytes: int) -> Block | None:
        """Return a block, or None: then an arena is on the way, unless the agent refused one just now."""
        request = self._backlog_request
        if request is not None:
            if not request.done:
                return None
            self._backlog_request = None
            if request.error is not None:
                return None
            request.block = None
        block = self._pool.allocate(nbytes)
        if block is None:
            self._backlog_request = ArenaRequest(0, nbytes)
            self._ask_for_arena(self._backlog_request)
        return block

    def _ask_for_arena(self, request: ArenaRequest, *, frugal: bool = False) -> None:
        for arena in self._pool.surplus(0) if frugal else self._pool.surplus():
            self._send(ReleaseArena(arena))
        request.nbytes = block_class(request.block_bytes) if frugal else self._pool.wanted(request.block_bytes)
        number = self._request()
        self._arena_requests[number] = request
        self._send(AllocateArena(number, request.nbytes))

    # Sending

    def _flush_returned(self) -> None:
        leases: list[int] = []
        while self.returned and len(leases) < MAX_LEASES:
            leases.append(self.returned.popleft())
        if leases:
            self.leased -= len(leases)
            self._send(ReleaseLeases(tuple(leases)))

    def _request(self) -> int:
        self._next_request += 1
        return self._next_request

    def _send(self, message: ToAgent) -> None:
        self._queue.append(encode(message))


def _gather(part: Part, target: Array) -> None:
    """Copy the sources one after the other into the flat ``target``."""
    offset = 0
    for source in part.sources:
        np.copyto(target[offset : offset + source.size].reshape(source.shape), source)
        offset += source.size


def _pieces(part: Part) -> Iterator[bytes]:
    """Yield the part's input as Upload messages of at most CHUNK bytes, made when they can leave."""
    request = part.request
    if len(part.sources) == 1 and part.sources[0].flags.c_contiguous:
        flat = part.sources[0].reshape(-1)
    else:
        flat = np.empty(part.count, part.dtype.storage)
        _gather(part, flat)
    part.sources = ()
    raw = flat.view(np.uint8)
    for start in range(0, raw.size, CHUNK):
        yield encode(Upload(request, raw[start : start + CHUNK].tobytes()))
