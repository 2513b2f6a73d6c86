"""The client's side of the local plane, without IO: what to send, and what an answer means.

A session feeds it the bytes and descriptors that arrive and sends what :meth:`Conversation.output` returns. It is not
thread-safe: the session's lock, or its event loop, guards it. Only ``returned`` is touched from elsewhere.
"""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from allreduced.client.arrays import Array
from allreduced.client.buffers import Lease, Mapping
from allreduced.client.operation import Operation, Outcome, Part
from allreduced.client.outbox import Outbox
from allreduced.client.staging import ArenaRequest, Staging, pieces
from allreduced.client.uses import Uses, further_name
from allreduced.core.errors import (
    AgentUnavailable,
    AllReducedError,
    AuthenticationError,
    ClosedError,
    InvalidArgument,
    LimitExceeded,
    ProtocolError,
    from_wire,
)
from allreduced.protocol.framing import MessageReader
from allreduced.protocol.job_secret import NO_SECRET, digest_of
from allreduced.protocol.local import (
    HIGHEST_VERSION,
    LOWEST_VERSION,
    MAX_LEASES,
    MAX_MESSAGE,
    SECRET_VERSION,
    WITH_DESCRIPTOR,
    ArenaGranted,
    Done,
    Download,
    GroupEnded,
    Hello,
    Join,
    Joined,
    Leave,
    Refused,
    ReleaseLeases,
    RequestFailed,
    ResultArena,
    ResultArenaGone,
    Submit,
    ToClient,
    Welcome,
    decode_to_client,
)
from allreduced.protocol.templates import SubmitTemplate

MAX_TEMPLATES = 4096
"""Different calls whose messages are kept ready."""

MAX_DESCRIPTORS = 16
"""Descriptors that may wait for their messages; an agent that sends more breaks the protocol."""


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
        self.told = False
        """Some caller knows that the agent was lost: the next call may attach again, to the agent that follows it."""
        self.completed: list[tuple[Part, Outcome]] = []
        """Parts that ended well and whose results the session has not taken yet, see :meth:`finish`."""
        self.returned: deque[int] = deque()
        """Leases that nothing reads any more. Appending to it is safe from anywhere."""
        self.leased = 0
        """Leases that the agent has not been told to be free."""
        self.on_release: Callable[[], None] | None = None
        self.owner: Callable[[], object] | None = None
        """Returns what must live as long as any lease: the connection, whose end would give all leases back."""
        self._outbox = Outbox()
        self._staging = Staging(self._outbox, shared_memory=shared_memory)
        self._results: dict[int, Mapping] = {}
        self._pending: dict[int, Part] = {}
        self._backlog: deque[Part] = deque()
        self._reader = MessageReader(MAX_MESSAGE)
        self._descriptors: deque[int] = deque()
        self._uses = Uses()
        self._join_request = 0
        self._default_deadline = 0.0
        self._all_ranks: tuple[int, ...] = ()
        self._templates: dict[tuple[object, ...], SubmitTemplate] = {}

    # What the session wants

    def hello(self) -> None:
        """Begin the conversation."""
        self._outbox.send(Hello(LOWEST_VERSION, HIGHEST_VERSION, os.getpid(), self.shared_memory))

    def join(
        self,
        *,
        job: str,
        group: str,
        rank: int,
        size: int,
        local_rank: int,
        deadline: float,
        default_deadline: float,
        job_secret: bytes = b"",
    ) -> None:
        """Ask for a rank of a group; ``joined`` or ``join_error`` will be set.

        ``default_deadline``: seconds, 0 for the agent's. ``job_secret``: empty for none; it is not sent itself.

        :raises AuthenticationError: there is a secret, and the agent is of a version that does not know of any.
        """
        version = self.welcome.version if self.welcome is not None else HIGHEST_VERSION
        if job_secret and version < SECRET_VERSION:
            raise AuthenticationError(
                f"this node's agent speaks version {version} of the protocol, which knows no job secrets",
                hint="install a newer version for the agent, or connect without job_secret (ALLREDUCED_JOB_SECRET)",
            )
        secret = digest_of(job_secret, job, group) if job_secret else NO_SECRET
        self._default_deadline = default_deadline
        self._join_request = self._outbox.next_request()
        self._outbox.send(
            Join(self._join_request, job, group, rank, size, local_rank, deadline, default_deadline, secret)
        )

    def submit(self, operation: Operation) -> None:
        """Start an operation. Its parts leave in the order of the calls, also where one waits for an arena.

        :raises AllReducedError: the connection or the group has ended.
        """
        if self.error is not None or self.group_error is not None:
            self.check()
        if self.returned:
            self._flush_returned()  # first: the agent may need that memory for this very call
        parts = operation.parts
        use = self._uses.count(parts[0].name)
        for part in parts[1:]:
            part.name = further_name(parts[0].name, part.signature.dtype, use)
        self._backlog.extend(parts)
        self.advance()

    def check(self) -> None:
        """Return if operations can be started.

        :raises AllReducedError: the connection or the group has ended.
        """
        error = self.group_error or self.error
        if error is not None:
            self.tell(error)
            raise copy.copy(error)  # a stored error must not collect the frames of its raisers

    def tell(self, error: AllReducedError | None) -> None:
        """Take note that a caller gets ``error``. Where that is the loss of the agent, it is ``told`` from now on.

        Not where the group had ended before: then it stays ended.
        """
        if error is self.error and isinstance(error, AgentUnavailable) and self.group_error is None:
            self.told = True

    @property
    def broken(self) -> bool:
        """True where the connection is of no use any more, not even to give leases back."""
        return self.error is not None and not isinstance(self.error, ClosedError)

    def allocate(self, nbytes: int) -> ArenaRequest:
        """Ask for a block of shared memory; the request is done now, or when the agent has answered."""
        return self._staging.allocate(nbytes)

    def leave(self) -> None:
        """Tell the agent that this rank leaves on purpose; end everything that is still pending here."""
        if self.error is None:
            if self.joined is not None and self.group_error is None:
                self._outbox.send(Leave(self.joined.group))
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
        self._staging.fail(error)
        self._results.clear()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popleft())

    @property
    def default_deadline(self) -> float:
        """Seconds until an operation is given up that names no deadline."""
        return self._default_deadline or (self.welcome.default_deadline if self.welcome is not None else 0.0)

    @property
    def failure_timeout(self) -> float:
        """Seconds by which the agent may end an operation later than its deadline, as far as it is known."""
        return self.joined.failure_timeout if self.joined is not None else 0.0

    @property
    def waiting(self) -> bool:
        """True while calls are held up because an earlier one waits for an arena."""
        return bool(self._backlog)

    # Output

    @property
    def has_output(self) -> bool:
        """True while there is something to send."""
        return bool(self._outbox.queue or self.returned)

    def output(self) -> list[bytes | memoryview]:
        """Return the next pieces to send; tell :meth:`sent` how much of them went out."""
        if self.returned:
            self._flush_returned()
        return self._outbox.pieces()

    def sent(self, nbytes: int) -> None:
        """Forget the first ``nbytes`` of the output."""
        self._outbox.sent(nbytes)

    def discard_output(self) -> None:
        """Forget the output: nobody takes it any more."""
        self.returned.clear()
        self.leased = 0
        self._outbox.clear()

    # Input

    def feed(self, data: memoryview | bytes, descriptors: Sequence[int] = ()) -> None:
        """Take what arrived. What ended well is in ``completed``; what failed has ended.

        :raises ProtocolError: the agent broke the protocol; the session must call :meth:`fail`.
        """
        if descriptors:
            self._descriptors.extend(descriptors)
        for body in self._reader.feed(data):
            if self.error is not None:
                break
            message = decode_to_client(body)
            if type(message) is Done and self.welcome is not None:
                self._on_done(message)
                continue
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
        if self._backlog:
            self.advance()

    def _handle(self, message: ToClient, descriptor: int) -> None:
        if isinstance(message, ArenaGranted):
            self._staging.granted(message, descriptor)
        elif isinstance(message, ResultArena):
            self._on_result_arena(message, descriptor)
        elif isinstance(message, Refused):
            self.fail(from_wire(message.error))
        elif isinstance(message, Welcome):
            self._on_welcome(message)
        elif self.welcome is None:
            raise ProtocolError(f"the agent sent {type(message).__name__} before Welcome")
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
        self._all_ranks = tuple(range(message.size))

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
        if self._staging.refused(message.request, error):
            return
        part = self._find(message.request, "RequestFailed")
        del self._pending[part.request]
        part.operation.part_failed(part, error)
        if isinstance(error, LimitExceeded):
            # Memory is short at the agent, perhaps of another rank: what is kept here for later may be what it lacks.
            self._staging.release_idle()

    def _on_done(self, message: Done) -> None:
        request, payload = message.request, message.payload
        part = self._pending.get(request) or self._find(request, "Done")
        if part.download is not None:
            raise ProtocolError(f"the agent sent Done for request {request} twice")
        nbytes, storage = part.signature.nbytes, part.signature.storage
        data: Array | None = None
        owned, lease = False, None
        if message.pieces:
            pass
        elif payload is not None:
            if len(payload) != nbytes:
                raise ProtocolError(f"the agent sent a result of {len(payload)} bytes for {nbytes}")
            data = np.frombuffer(payload, storage)
        elif message.arena >= 0:
            mapping = self._results.get(message.arena)
            if mapping is None:
                raise ProtocolError(f"the agent sent a result in arena {message.arena}, which it did not send")
            if message.nbytes != nbytes or message.offset + message.nbytes > mapping.nbytes:
                raise ProtocolError(f"the agent sent a result outside arena {message.arena}, or of a wrong size")
            keep = self.owner() if self.owner is not None else None
            lease = Lease(mapping, message.offset, message.nbytes, message.lease, self._release, keep)
            self.leased += 1
            data = lease.array((part.signature.count,), storage)
        elif nbytes:
            raise ProtocolError(f"the agent sent no result for an operation of {nbytes} bytes")
        elif part.sinks:
            data, owned = np.empty(0, storage), True
        participants = message.participants or self._all_ranks
        outcome = Outcome(data, owned, lease, participants, message.algorithm, message.elapsed)
        if message.pieces:
            part.head = outcome
            part.download = np.empty(part.signature.count, storage)
            return
        del self._pending[request]
        self.completed.append((part, outcome))

    def _on_download(self, message: Download) -> None:
        part = self._pending.get(message.request)
        if part is None or part.download is None or part.head is None:
            raise ProtocolError(f"the agent sent a piece of request {message.request}, which expects none")
        target = part.download.view(np.uint8)
        end = part.downloaded + len(message.data)
        nbytes = part.signature.nbytes
        if end > nbytes or message.last != (end == nbytes):
            raise ProtocolError(f"the agent sent pieces that do not make {nbytes} bytes")
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
        place = self._staging.place(part, self.welcome.inline_limit)
        if place is None:
            return False
        request = part.request = self._outbox.next_request()
        self._pending[request] = part
        operation = part.operation
        key = (part.signature, part.name, operation.priority, operation.deadline, operation.algorithm)
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            template = self._templates[key] = self._template(part, self.joined.group)
        self._outbox.send_encoded(template.encode(request, *place))
        if place.upload:
            self._outbox.send_pieces(pieces(part))
        else:
            part.sources = ()
        return True

    def _template(self, part: Part, group: int) -> SubmitTemplate:
        signature, operation = part.signature, part.operation
        return SubmitTemplate(
            Submit(
                request=0,
                group=group,
                kind=signature.kind,
                name=part.name,
                dtype=int(signature.dtype),
                op=int(signature.reduction),
                shape=signature.shape,
                count=signature.count,
                root=signature.root,
                priority=operation.priority,
                deadline=operation.deadline,
                algorithm=operation.algorithm,
                payload=None,
                arena=-1,
                offset=0,
                upload=False,
                inline_result=not self.shared_memory,
            )
        )

    # Sending

    def _flush_returned(self) -> None:
        leases: list[int] = []
        while self.returned and len(leases) < MAX_LEASES:
            leases.append(self.returned.popleft())
        if leases:
            self.leased -= len(leases)
            self._outbox.send(ReleaseLeases(tuple(leases)))
