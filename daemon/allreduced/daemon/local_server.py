"""The local plane: accepts this node's clients over a Unix socket and answers them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Sequence
from dataclasses import replace

from allreduced.core.accept_budget import AcceptBudget
from allreduced.core.errors import AllReducedError, LimitExceeded, to_wire
from allreduced.core.identity import GroupKey
from allreduced.core.log_limit import LogLimit
from allreduced.core.refusals import Kind, Plane, kind_of, refused
from allreduced.daemon.access import Access, own_uid_only
from allreduced.daemon.arena_table import ArenaTable
from allreduced.daemon.client_connection import READ_BYTES, ClientConnection
from allreduced.daemon.client_session import ClientSession
from allreduced.daemon.engine.events import GroupStarted
from allreduced.daemon.lifetime import Lifetime
from allreduced.daemon.local_limits import LocalLimits
from allreduced.daemon.ports import EventSink, Result
from allreduced.daemon.session_context import LocalContext
from allreduced.daemon.slab import Slab
from allreduced.daemon.socket_path import BoundSocket, bind_socket
from allreduced.daemon.status import Answer, Answered, StatusService
from allreduced.daemon.users import Users
from allreduced.protocol.local import Refused, encode

logger = logging.getLogger("allreduced.local")

ACCEPT_AT_ONCE = 64
"""Connections that are accepted before everything else has its turn."""

RETRY_ACCEPT = 0.5
"""Seconds without accepting after the process ran out of descriptors."""


class LocalServer:
    """Serves the clients of one agent. Implements ``ports.ClientPort``.

    Everything runs on the loop's thread; nothing blocks. A client that breaks the protocol, sends too much or does not
    read is dropped with one log line, and nobody else notices.
    """

    def __init__(
        self,
        sink: EventSink,
        arenas: ArenaTable,
        *,
        node: str,
        incarnation: int,
        limits: LocalLimits | None = None,
        default_deadline: float = 300.0,
        failure_timeout: float = 5.0,
        access: Access | None = None,
        job_secrets: bool = False,
    ) -> None:
        """``default_deadline``: seconds, for operations whose group names none.

        ``failure_timeout``: seconds by which an operation may end later than its deadline.
        ``access``: who may attach; by default the agent's own user. ``job_secrets``: whether who joins must give one.
        """
        self.limits = limits or LocalLimits()
        self._log = LogLimit(logger)
        self._slab = Slab(arenas, slot_bytes=self.limits.inline, max_bytes=self.limits.inline_bytes)
        self._context = LocalContext(
            sink=sink,
            arenas=arenas,
            slab=self._slab,
            limits=self.limits,
            node=node,
            incarnation=incarnation,
            default_deadline=default_deadline,
            failure_timeout=failure_timeout,
            log=self._log,
            users=Users(),
            job_secrets=job_secrets,
            drop_stale=self.drop_stale,
            ask_status=self._ask_status,
            changed=self._clients_changed,
            forget=self._forget,
        )
        self._users = self._context.users
        self._access = access or own_uid_only()
        self._status: StatusService | None = None
        self._scratch = bytearray(READ_BYTES)
        self._sessions: dict[int, ClientSession] = {}
        self._budget = AcceptBudget()
        self._strangers: dict[int, ClientSession] = {}
        """Those that have not said hello yet, oldest first."""
        self._served = False
        self._lifetime: Lifetime | None = None
        self._bound: BoundSocket | None = None
        self._loop: asyncio.AbstractEventLoop

    @property
    def clients(self) -> int:
        """Connections that are open."""
        return self._users.clients

    @property
    def served(self) -> int:
        """The same, without those that only ask for the status."""
        return sum(session.attached and session.served for session in self._sessions.values())

    def report_to(self, lifetime: Lifetime) -> None:
        """Tell ``lifetime`` of every change in the number of clients from now on."""
        self._lifetime = lifetime

    def use_status(self, status: StatusService) -> None:
        """Answer what clients ask about the status from there."""
        self._status = status

    def _ask_status(self, uid: int, others: bool, answered: Answered, probe: int) -> None:
        if self._status is None:
            answered(Answer((), ()))
        else:
            self._status.ask(uid, answered, others=others, probe=probe)

    def process_of(self, client: int) -> int:
        """Return the pid of the client's process; 0 where it is gone, or in a container of its own."""
        session = self._sessions.get(client)
        return session.connection.pid if session is not None and not session.gone else 0

    def is_connected(self, client: int) -> bool:
        """Return whether the client's process still has its connection open.

        Looks at the socket itself: one whose end was not noticed yet is dropped by this call, with all that follows.
        """
        session = self._sessions.get(client)
        if session is None or session.gone:
            return False
        if session.connection.hung_up():
            session.connection.read_to_end()
        return not session.gone

    def use_limits(self, limits: LocalLimits) -> None:
        """Hold new connections to these limits; those that are open stay under the ones that they were made under.

        ``inline`` and ``inline_bytes`` stay as they are.
        """
        limits = replace(limits, inline=self.limits.inline, inline_bytes=self.limits.inline_bytes)
        self.limits = limits
        self._context = replace(self._context, limits=limits)

    def use_access(self, access: Access, *, job_secrets: bool) -> None:
        """Judge new connections by this; clients that are attached stay. ``job_secrets``: who joins must give one."""
        self._access = access
        self._context = replace(self._context, job_secrets=job_secrets)

    # Listening

    def listen(self, name: str, *, mode: int = 0o600, group: int = -1) -> None:
        """Bind the ``socket`` setting (a path, or ``@name``) and accept clients, on the running loop.

        ``mode``: permissions of the socket file, ``group``: its gid, -1 to leave it. They decide who can connect;
        whether it may attach is judged then.

        :raises ConfigError: the socket cannot be had; the message says why.
        """
        self.serve(bind_socket(name, mode=mode, group=group))

    def serve(self, bound: BoundSocket) -> None:
        """Accept clients there, on the running loop. The socket is this server's from now on."""
        self._loop = asyncio.get_running_loop()
        self._bound = bound
        self._loop.add_reader(self._bound.sock.fileno(), self._accept)

    def stop_listening(self) -> None:
        """Take no new connections; those that are open go on. Removes the socket file. Idempotent."""
        bound, self._bound = self._bound, None
        if bound is not None:
            self._loop.remove_reader(bound.sock.fileno())
            bound.close()

    def _accept(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            if self._bound is None:
                return
            pause = self._budget.wait(self._loop.time())
            if pause:
                self._pause_accepting(pause)
                return
            try:
                sock, _ = self._bound.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors or no memory: the connection waits, and asking again is no use
                self._log.warning("event=accept_failed error=%r", error.strerror)
                self._pause_accepting(RETRY_ACCEPT)
                return
            sock.setblocking(False)
            self._budget.take(self._loop.time())
            self._take(sock)

    def _pause_accepting(self, seconds: float) -> None:
        """Leave connections in the kernel's queue for a while."""
        if self._bound is not None:
            self._loop.remove_reader(self._bound.sock.fileno())
            self._loop.call_later(seconds, self._accept_again)

    def _accept_again(self) -> None:
        if self._bound is not None:
            self._loop.add_reader(self._bound.sock.fileno(), self._accept)

    def _take(self, sock: socket.socket) -> None:
        limits = self.limits
        connection = ClientConnection(sock, limits, self._scratch)
        who = connection.credentials
        observer = not self._access.may_attach(who)
        if observer and not self._access.may_look(who):
            self._turn_away(sock, self._access.refusal(who))
            return
        error = self._full(who.uid)
        if error is not None and self._make_room(who.uid, error):
            error = self._full(who.uid)
        if error is not None:
            self._turn_away(sock, error)
            return
        client = secrets.randbits(63)
        looks_only = self._access.looks_only if observer else None
        session = ClientSession(client, connection, self._context, looks_only=looks_only)
        self._sessions[client] = self._strangers[client] = session
        connection.start(session)
        self._clients_changed(session)
        self._loop.call_later(limits.hello_timeout, self._hello_due, session)

    def _full(self, uid: int) -> LimitExceeded | None:
        """Return the error for one more client of this user, None where there is room."""
        limits, users = self.limits, self._users
        if users.clients >= limits.clients:
            limit, most, whose = "limits.clients", limits.clients, ""
        elif users.get(uid).clients >= limits.clients_per_user:
            limit, most, whose = "limits.clients_per_user", limits.clients_per_user, f" of uid {uid}"
        else:
            return None
        return LimitExceeded(
            f"{most} clients{whose} are connected, the most that the agent allows ({limit})",
            limit=limit,
            hint=f"close some of them, or raise {limit}",
        )

    def _make_room(self, uid: int, error: LimitExceeded) -> bool:
        """End the oldest connection that has not said hello, of this user if it has too many: clients come first."""
        for session in self._strangers.values():
            if error.limit == "limits.clients" or session.connection.uid == uid:
                session.connection.refuse(error)
                return True
        return False

    def _turn_away(self, sock: socket.socket, error: AllReducedError) -> None:
        refused(Plane.CLIENTS, kind_of(error, Kind.ACCESS))
        self._log.warning("event=client_refused reason=%r", error.message)
        with sock:
            try:
                sock.send(encode(Refused(to_wire(error))))  # fits into the buffer of a fresh socket
            except OSError as gone:
                logger.debug("event=refused_client_gone error=%r", gone.strerror)

    def _hello_due(self, session: ClientSession) -> None:
        if not session.attached and not session.gone:
            session.connection.refuse(
                LimitExceeded(
                    f"said no hello within {self.limits.hello_timeout:g} s (limits.hello_timeout)",
                    limit="limits.hello_timeout",
                    hint="send a Hello at once, or raise limits.hello_timeout",
                ),
                Kind.TIMEOUT,
            )

    def drop_stale(self, key: GroupKey, but: int = -1) -> None:
        """Let nobody be refused a rank that a dead process holds: jobs are run again faster than their end is seen."""
        for session in tuple(self._sessions.values()):
            if session.client != but and not session.gone and session.claims(key):
                self.is_connected(session.client)

    def _clients_changed(self, session: ClientSession) -> None:
        """Take note that a connection began, said hello, or ended."""
        known = session.client not in self._strangers
        if session.attached and not known:
            self._budget.give_back()
        if session.attached or session.gone:
            self._strangers.pop(session.client, None)
        if known and session.unwanted:
            self._budget.take(self._loop.time())  # a good one that went bad
        # Only at a connection's end is it known whether the client did more than to ask for the status.
        self._served = self._served or (session.gone and session.served)
        if self._lifetime is not None:
            self._lifetime.clients_changed(self.clients, served=self._served)

    def _forget(self, client: int) -> None:
        self._sessions.pop(client, None)

    # ClientPort

    def admitted(self, client: int, request: int, rank: int, started: GroupStarted) -> None:
        """Send Joined."""
        if session := self._sessions.get(client):
            session.admitted(request, rank, started)

    def failed(self, client: int, request: int, error: AllReducedError) -> None:
        """Send RequestFailed (of a join or of an operation)."""
        if session := self._sessions.get(client):
            session.failed(request, error)

    def delivered(self, client: int, request: int, result: Result) -> None:
        """Send Done; ``result.data`` is copied before this returns."""
        if session := self._sessions.get(client):
            session.delivered(request, result)

    def arena_gone(self, arena: int) -> None:
        """Tell the clients that have the result arena that it is dropped."""
        for session in tuple(self._sessions.values()):
            if not session.gone:
                session.results.arena_gone(arena)

    def group_ended(self, clients: Sequence[int], group: int, error: AllReducedError) -> None:
        """Send GroupEnded."""
        for client in clients:
            if session := self._sessions.get(client):
                session.group_ended(group, error)

    # The end

    async def close(self, timeout: float = 1.0) -> None:
        """Stop listening, wait ``timeout`` seconds at most for clients to read what waits for them, close all.

        The driver still gets the events that follow from it.
        """
        self.stop_listening()
        try:
            async with asyncio.timeout(timeout):
                for session in tuple(self._sessions.values()):
                    await session.connection.flushed()
        except TimeoutError:
            self._log.warning("event=clients_did_not_read seconds=%.1f", timeout)
        for session in tuple(self._sessions.values()):
            session.connection.close("the agent stops", orderly=True)

    def release_memory(self) -> None:
        """Let go of the slab, after :meth:`close` and before the arenas are closed."""
        self._slab.close()
