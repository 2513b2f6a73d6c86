"""The groups of one client: those that it waits to join, those that it has a rank in, those that ended under it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from allreduced.core.errors import AllReducedError, AuthenticationError, InvalidArgument, to_wire
from allreduced.core.identity import GroupKey
from allreduced.daemon.activity import Call, describe, describe_all
from allreduced.daemon.client_connection import ClientConnection
from allreduced.daemon.client_inputs import ClientOperation
from allreduced.daemon.engine.events import GroupStarted
from allreduced.daemon.membership.events import ClientJoining, ClientLeaving
from allreduced.daemon.session_context import LocalContext
from allreduced.daemon.submission import HeldGroup
from allreduced.daemon.users import User
from allreduced.protocol import local
from allreduced.protocol.job_secret import proof_of

_ENDED: Final = 256
"""Groups that ended under a client and that it did not leave: so many are remembered, to tell why calls fail."""


@dataclass(frozen=True, slots=True)
class _Join:
    key: GroupKey
    default_deadline: float


class ClientGroups:
    """Turns joins and leaves into events, and tells the client what came of them."""

    def __init__(self, client: int, connection: ClientConnection, context: LocalContext, user: User) -> None:
        self._client = client
        self._connection = connection
        self._context = context
        self._user = user
        self.joining: dict[int, _Join] = {}
        """By request."""
        self.held: dict[int, HeldGroup] = {}
        self._keys: dict[int, GroupKey] = {}
        self._ended: dict[int, AllReducedError] = {}

    def claims(self, key: GroupKey) -> bool:
        """Return whether the client holds or waits for a rank of the group."""
        return key in self._keys.values() or any(join.key == key for join in self.joining.values())

    def missing(self, group: int) -> AllReducedError | None:
        """Return how a group ended that the client held, if it did."""
        return self._ended.get(group)

    # What the client asks for

    def join(self, message: local.Join, pid: int) -> None:
        """Let a process join.

        :raises InvalidArgument: there is no such rank.
        :raises AuthenticationError: the secret of the job is missing.
        """
        context, sink = self._context, self._context.sink
        if message.rank >= message.size:
            raise InvalidArgument(
                f"rank {message.rank} is outside a group of {message.size}: ranks are 0 to {message.size - 1}"
            )
        if context.job_secrets and not message.secret:
            raise AuthenticationError(
                "this agent asks every rank for the secret of its job (access.job_secrets is 'required'), and rank "
                f"{message.rank} of group {message.group!r} of job {message.job!r} gave none",
                hint="give all ranks the same connect(job_secret=…) or ALLREDUCED_JOB_SECRET",
            )
        key = GroupKey(self._connection.uid, message.job, message.group)
        proof = proof_of(message.secret, key)
        context.drop_stale(key, self._client)
        self.joining[message.request] = _Join(key, message.default_deadline or context.default_deadline)
        self._user.requests += 1
        self._user.groups += 1
        sink.membership_event(
            ClientJoining(
                self._client,
                message.request,
                key,
                message.size,
                message.rank,
                message.local_rank,
                pid,
                sink.now() + message.deadline,
                proof,
            )
        )

    def leave(self, message: local.Leave) -> None:
        """Give a rank back."""
        self._ended.pop(message.group, None)
        self._keys.pop(message.group, None)
        if self.held.pop(message.group, None) is not None:
            self._user.groups -= 1
            self._context.sink.membership_event(ClientLeaving(self._client, message.group))

    # What came of it

    def admitted(self, request: int, rank: int, started: GroupStarted) -> None:
        """Send Joined."""
        join = self.joining.pop(request, None)
        if join is None:
            return
        self._user.requests -= 1
        group = started.group
        self.held[group] = HeldGroup(group, rank, started.size, join.default_deadline)
        self._keys[group] = join.key
        nodes = tuple((member.node, member.ranks) for member in started.members)
        late = self._context.failure_timeout
        self._connection.send(
            local.Joined(request, group, started.generation, rank, started.size, started.mine, nodes, late)
        )

    def not_admitted(self, request: int) -> GroupKey | None:
        """Take note that a join failed; return of which group, or None if there was none."""
        join = self.joining.pop(request, None)
        if join is None:
            return None
        self._user.requests -= 1
        self._user.groups -= 1
        return join.key

    def ended(self, group: int, error: AllReducedError) -> None:
        """Send GroupEnded if the client is in the group."""
        if self.held.pop(group, None) is not None:
            self._user.groups -= 1
            self._keys.pop(group, None)
            self._ended[group] = error
            if len(self._ended) > _ENDED:
                del self._ended[next(iter(self._ended))]
            self._connection.send(local.GroupEnded(group, to_wire(error)))

    def clear(self) -> None:
        """Forget all of them: the connection is over."""
        self._user.requests -= len(self.joining)
        self._user.groups -= len(self.joining) + len(self.held)
        self.joining.clear()
        self.held.clear()
        self._keys.clear()

    def doing(self, operations: Iterable[ClientOperation]) -> str:
        """Return what the client does right now, in words."""
        now = self._context.sink.now()
        waiting: dict[int, list[Call]] = {group: [] for group in self.held}
        for operation in operations:
            message = operation.message
            if held := self.held.get(message.group):
                begun = operation.deadline_at - (message.deadline or held.default_deadline)
                waiting[held.group].append(Call(operation.call, message.kind, message.name, now - begun))
        return describe_all(
            [
                (self._keys[group].name, describe(Call(held.calls, *held.last) if held.calls else None, waiting[group]))
                for group, held in self.held.items()
            ]
        )
