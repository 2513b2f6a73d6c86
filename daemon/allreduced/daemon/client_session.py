"""What the agent knows about one client: its ranks, its operations in flight, what it was sent."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator

from allreduced.core.dtypes import DType
from allreduced.core.errors import (
    AllReducedError,
    AuthenticationError,
    InvalidArgument,
    LimitExceeded,
    ProtocolError,
    to_wire,
)
from allreduced.core.identity import GroupKey
from allreduced.core.refusals import Plane, kind_of, refused
from allreduced.daemon.access import Credentials
from allreduced.daemon.client_connection import ClientConnection
from allreduced.daemon.client_groups import ClientGroups
from allreduced.daemon.client_inputs import ClientInputs, ClientOperation
from allreduced.daemon.engine.events import ClientGone as EngineClientGone
from allreduced.daemon.engine.events import GroupStarted, LeasesReturned, Submitted
from allreduced.daemon.local_limits import check_groups, check_requests
from allreduced.daemon.membership.events import ClientGone
from allreduced.daemon.ports import Result
from allreduced.daemon.report import sees_everything
from allreduced.daemon.results import Results
from allreduced.daemon.session_context import LocalContext
from allreduced.daemon.status import Answer
from allreduced.daemon.submission import HeldGroup, Submission, check_submit, fingerprint_of
from allreduced.protocol import local

logger = logging.getLogger("allreduced.local")


class ClientSession:
    """Owner of one client's connection: checks what it asks for and turns it into events, and answers it.

    After the connection's end the session stays until the last of its operations ended, for their inputs are in use.
    """

    def __init__(
        self,
        client: int,
        connection: ClientConnection,
        context: LocalContext,
        *,
        looks_only: Callable[[Credentials], AuthenticationError] | None = None,
    ) -> None:
        """``looks_only``: makes the error for whatever it asks for but the status; None where it may attach."""
        self.client = client
        self.connection = connection
        self._context = context
        self._limits = context.limits
        self._sink = context.sink
        self.results = Results(client, connection, context.arenas, context.sink, inline_limit=context.limits.inline)
        self._attached = False
        self._user = context.users.connected(connection.uid)
        self._pid = connection.pid
        self._shared_memory = True
        self._groups = ClientGroups(client, connection, context, self._user)
        self._held = self._groups.held
        self._joins = self._groups.joining
        self._inputs = ClientInputs(client, self._user.uid, context.arenas, context.slab)
        self._operations: dict[int, ClientOperation] = {}
        self._streams = 0
        """Those of them whose data travels in pieces."""
        self._allocations: set[int] = set()
        self._looks_only = looks_only
        self._asking = self._looked = False
        """A question for the status is not answered yet; there was one."""
        self._used = False
        """It asked for something else than the status."""
        self._gone = self._disorderly = False
        self._do: dict[type, Callable[..., None]] = {
            local.Submit: self._submit,
            local.ReleaseLeases: self._release_leases,
            local.Upload: self._upload,
            local.AllocateArena: self._allocate,
            local.ReleaseArena: self._release_arena,
            local.Join: self._join,
            local.Leave: self._leave,
            local.AskStatus: self._ask_status,
        }

    @property
    def attached(self) -> bool:
        """True once the hello was answered and until the connection ends."""
        return self._attached and not self._gone

    @property
    def gone(self) -> bool:
        """True once the connection ended."""
        return self._gone

    @property
    def unwanted(self) -> bool:
        """True for a connection that ended without a hello, or in disorder."""
        return self._gone and (self._disorderly or not self._attached)

    @property
    def served(self) -> bool:
        """True for a client that did more than look at the status: a private agent lives for such clients."""
        return self._attached and (self._used or not self._looked)

    def claims(self, key: GroupKey) -> bool:
        """Return whether the client holds or waits for a rank of the group."""
        return self._groups.claims(key)

    # What the client sends

    def message(self, message: local.ToAgent) -> None:
        """Take one message.

        :raises ProtocolError: its type is not allowed now, or it reuses the number of a request in flight.
        """
        if not self._attached:
            self._hello(message)
            return
        do = self._do.get(type(message))
        if do is None:
            raise ProtocolError("a second hello on one connection")
        if not self._used and type(message) is not local.AskStatus:
            self._used = True
            if self._looks_only is not None:
                self.connection.refuse(self._looks_only(self.connection.credentials))
                return
        do(message)

    def _ask_status(self, message: local.AskStatus) -> None:
        request = self._new_request(message.request)
        if self._asking:
            raise ProtocolError("the status was asked for again before the answer came")
        self._asking = self._looked = True

        def answered(answer: Answer) -> None:
            self._asking = False
            self.connection.stream(_status(request, answer))

        # To dial others on somebody's word is for those who run the agent.
        probe = message.probe if sees_everything(self.connection.uid, os.geteuid()) else 0
        self._context.ask_status(self.connection.uid, message.others, answered, probe)

    def _hello(self, message: local.ToAgent) -> None:
        if not isinstance(message, local.Hello):
            raise ProtocolError(f"the first message must be a Hello, not {type(message).__name__}")
        context, connection = self._context, self.connection
        version = min(message.highest, local.HIGHEST_VERSION)
        if version < max(message.lowest, local.LOWEST_VERSION):
            raise ProtocolError(
                f"the client speaks versions {message.lowest} to {message.highest} of the protocol, this agent "
                f"{local.LOWEST_VERSION} to {local.HIGHEST_VERSION}",
                hint="install the same version of allreduced for agent and clients",
            )
        self._attached = True
        self._pid = connection.pid or message.pid  # the kernel tells 0 for a process of another container
        self._shared_memory = message.shared_memory
        connection.send(
            local.Welcome(version, context.node, context.incarnation, context.limits.inline, context.default_deadline)
        )
        context.changed(self)

    def _join(self, message: local.Join) -> None:
        request = self._new_request(message.request)
        try:
            self._check_room()
            check_groups(self._limits, len(self._groups.joining) + len(self._groups.held), self._user)
            self._groups.join(message, self._pid)
        except AllReducedError as error:
            self._deny(request, message.job, message.group, error)

    def _leave(self, message: local.Leave) -> None:
        self._groups.leave(message)

    def _allocate(self, message: local.AllocateArena) -> None:
        request = self._new_request(message.request)
        try:
            if not self._shared_memory:
                raise InvalidArgument("this client said that it cannot take descriptors; send the input in pieces")
            self._allocations.add(request)
            self._context.arenas.create_input(
                self.client,
                message.nbytes,
                lambda arena, error: self._allocated(request, arena, error),
                user=self._user.uid,
            )
        except AllReducedError as error:
            self._allocations.discard(request)
            self._refuse_arena(request, error)

    def _allocated(self, request: int, arena: int, error: AllReducedError | None) -> None:
        self._allocations.discard(request)
        if error is not None:
            self._refuse_arena(request, error)
            return
        arenas = self._context.arenas
        self.connection.send(local.ArenaGranted(request, arena, arenas.nbytes(arena)), arenas.descriptor(arena))
        arenas.descriptor_sent(arena)

    def _release_arena(self, message: local.ReleaseArena) -> None:
        if self._context.arenas.owns(self.client, message.arena):
            self._context.arenas.drop(message.arena)

    def _release_leases(self, message: local.ReleaseLeases) -> None:
        self._sink.engine_event(LeasesReturned(self.client, message.leases))

    def _submit(self, message: local.Submit) -> None:
        request = message.request
        operations = self._operations
        if request in operations or self._joins or self._allocations:
            self._new_request(request)
        held = self._held.get(message.group)
        if held is None:
            error = self._groups.missing(message.group) or InvalidArgument(
                f"this client holds no rank of group {message.group}", hint="join it first"
            )
            self._refuse_request(request, error)
            return
        held.calls += 1
        held.last = message.kind, message.name
        deadline_at = self._sink.now() + (message.deadline or held.default_deadline)
        operation = ClientOperation(message, deadline_at, call=held.calls)
        try:
            limits = self._limits
            if len(operations) + len(self._joins) >= limits.requests or self._user.requests >= limits.requests_per_user:
                self._check_room()
            submission = operation.submission = check_submit(message, held, limits.inline)
            if message.upload or message.inline_result or not self._shared_memory:
                self._check_streams(operation, submission)
            if submission.nbytes:
                if message.upload:
                    self._begin_upload(request, operation, submission.nbytes)
                    return
                if message.payload is not None:
                    self._inputs.store(operation, message.payload)
                else:
                    self._inputs.hold(operation, submission.nbytes)
        except AllReducedError as error:
            operation.refused = error
        self._keep(request, operation)
        self._start(request, operation, held)

    def _start(self, request: int, operation: ClientOperation, held: HeldGroup) -> None:
        """Give a complete operation to the engine; from here on it ends by ``delivered`` or ``failed``."""
        message, submission = operation.message, operation.submission
        self._sink.engine_event(
            Submitted(
                self.client,
                request,
                held.group,
                held.rank,
                message.name,
                submission.fingerprint if submission is not None else fingerprint_of(message),
                operation.source,
                operation.deadline_at,
                message.priority,
                operation.refused,
            )
        )

    # Inputs in pieces

    def _begin_upload(self, request: int, operation: ClientOperation, nbytes: int) -> None:
        """Make room for the input; the connection waits for it, so that pieces find it."""

        def made(error: AllReducedError | None) -> None:
            if error is not None:
                operation.refused = error
                self._complete(request, operation)
            self.connection.resume()

        self._inputs.make_room(operation, nbytes, made)
        self._keep(request, operation)
        self.connection.pause()

    def _upload(self, message: local.Upload) -> None:
        operation = self._operations.get(message.request)
        if operation is None or (operation.refused is not None and operation.message.upload):
            return  # pieces of a submit that was refused are on their way still
        if self._inputs.take_piece(operation, message):
            self._complete(message.request, operation)

    def _complete(self, request: int, operation: ClientOperation) -> None:
        """Go on with an operation whose input is there, or will never be."""
        operation.uploaded = None
        held = self._held.get(operation.message.group)
        if held is None:  # left or ended meanwhile
            error = self._groups.missing(operation.message.group) or InvalidArgument("the group was left meanwhile")
            self.failed(request, error)
        else:
            self._start(request, operation, held)

    # Limits and refusals

    def _new_request(self, request: int) -> int:
        if request in self._operations or request in self._joins or request in self._allocations:
            raise ProtocolError(f"request {request} is in flight already")
        return request

    def _check_room(self) -> None:
        check_requests(self._limits, len(self._operations) + len(self._joins), self._user)

    def _check_streams(self, operation: ClientOperation, submission: Submission) -> None:
        """Refuse one more large tensor that travels in pieces where there are enough of them."""
        fingerprint = submission.fingerprint
        nbytes = fingerprint.count * DType(fingerprint.dtype).itemsize
        operation.streams = operation.message.upload or nbytes > self._limits.inline
        most = self._limits.streams
        if operation.streams and self._streams + self.connection.streams >= most:
            operation.streams = False
            raise LimitExceeded(
                f"{most} large tensors of this process travel inside messages, the most that the agent allows"
                " (limits.streams)",
                limit="limits.streams",
                hint="wait for some of them first, use shared memory, or raise limits.streams",
            )

    def _deny(self, request: int, job: str, group: str, error: AllReducedError) -> None:
        """Refuse a join, and tell those who run the agent where a secret or a limit stands in the way."""
        if isinstance(error, AuthenticationError | LimitExceeded):
            refused(Plane.CLIENTS, kind_of(error))
            self._context.log.warning(
                "event=join_refused job=%s group=%s uid=%d pid=%d reason=%r",
                job,
                group,
                self.connection.uid,
                self._pid,
                error.message,
            )
        self._refuse_request(request, error)

    def _refuse_arena(self, request: int, error: AllReducedError) -> None:
        """Refuse an arena. The client asks for less then, or its operation fails, which is counted."""
        if isinstance(error, LimitExceeded):
            self._context.log.log(
                logging.INFO,
                "event=arena_refused uid=%d pid=%d reason=%r",
                self.connection.uid,
                self._pid,
                error.message,
            )
        self._refuse_request(request, error)

    def _refuse_request(self, request: int, error: AllReducedError) -> None:
        self.connection.send(local.RequestFailed(request, to_wire(error)))

    # What the client is told

    def admitted(self, request: int, rank: int, started: GroupStarted) -> None:
        """Send Joined."""
        if not self._gone:
            self._groups.admitted(request, rank, started)

    def failed(self, request: int, error: AllReducedError) -> None:
        """Send RequestFailed, for a join or an operation."""
        operation = self._operations.get(request)
        if operation is not None:
            self._refuse_request(request, error)
            self._operation_over(request, operation)
        elif (key := self._groups.not_admitted(request)) is not None:
            self._deny(request, key.job, key.name, error)

    def delivered(self, request: int, result: Result) -> None:
        """Send Done, with the result or where it is, and let go of the operation's input."""
        operation = self._operations.get(request)
        if operation is None or self._gone:
            if operation is not None:
                self._operation_over(request, operation)
            self.results.return_lease(result.lease)
            return
        by_arena = self._shared_memory and not operation.message.inline_result
        self.results.give(request, result, by_arena=by_arena)
        if operation.in_slab and operation.source is not None:
            self._drop(request, operation)
            self._context.slab.free(operation.source)
        else:
            self._operation_over(request, operation)

    def group_ended(self, group: int, error: AllReducedError) -> None:
        """Send GroupEnded if the client is in the group."""
        self._groups.ended(group, error)

    # The end

    def closed(self, reason: str, *, orderly: bool) -> None:
        """Take note of the connection's end: ranks are lost, arenas and leases are free."""
        pid, uid = self._pid, self.connection.uid
        if orderly:
            logger.debug("event=client_closed pid=%d uid=%d reason=%r", pid, uid, reason)
        else:
            self._context.log.warning("event=client_dropped pid=%d uid=%d reason=%r", pid, uid, reason)
        self._gone = True
        self._disorderly = not orderly
        if self._attached:
            self._sink.membership_event(ClientGone(self.client, self._groups.doing(self._operations.values())))
            self._sink.engine_event(EngineClientGone(self.client))
        for request, operation in tuple(self._operations.items()):
            if operation.uploaded is not None:  # the engine does not know of it
                self._drop(request, operation)
                self._inputs.free(operation)
        self._context.arenas.drop_client(self.client)
        self._groups.clear()
        self._context.users.disconnected(self._user)
        self._context.changed(self)
        self._look_empty()

    def _keep(self, request: int, operation: ClientOperation) -> None:
        self._operations[request] = operation
        self._user.requests += 1
        self._streams += operation.streams

    def _drop(self, request: int, operation: ClientOperation) -> None:
        del self._operations[request]
        self._user.requests -= 1
        self._streams -= operation.streams

    def _operation_over(self, request: int, operation: ClientOperation) -> None:
        self._drop(request, operation)
        self._inputs.free(operation)
        if self._gone:
            self._look_empty()

    def _look_empty(self) -> None:
        if not self._operations:
            self._context.users.settle(self._user)
            self._context.forget(self.client)


def _status(request: int, answer: Answer) -> Generator[local.ToClient, None, None]:
    for report in answer.reports:
        yield local.AgentStatus(request, report)
    yield local.StatusEnd(request, answer.unanswered)
