"""The local plane: accepts this node's clients over a Unix socket and answers them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from allreduced.core.errors import AllReducedError, AuthenticationError, LimitExceeded, to_wire
from allreduced.core.identity import GroupKey
from allreduced.core.log_limit import LogLimit
from allreduced.daemon.arena_table import ArenaTable
from allreduced.daemon.client_connection import READ_BYTES, ClientConnection
from allreduced.daemon.client_session import ClientSession, LocalContext
from allreduced.daemon.engine.events import GroupStarted
from allreduced.daemon.lifetime import Lifetime
from allreduced.daemon.local_limits import LocalLimits
from allreduced.daemon.ports import EventSink, Result
from allreduced.daemon.slab import Slab
from allreduced.daemon.socket_path import BoundSocket, bind_socket
from allreduced.daemon.status import Answer, Answered, StatusService
from allreduced.protocol.local import Refused, encode

logger = logging.getLogger("allreduced.local")

ACCEPT_AT_ONCE = 64
RETRY_ACCEPT = 0.5


def own_uid_only(uid: int) -> bool:
    """Return whether ``uid`` is the agent's own; the default of who may attach."""
    return uid == os.geteuid()


def root_only(uid: int) -> bool:
    """Return whether ``uid`` is root's; the default of who may look without being allowed to attach."""
    return uid == 0


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
        uid_allowed: Callable[[int], bool] = own_uid_only,
        observer_allowed: Callable[[int], bool] = root_only,
    ) -> None:
        """``default_deadline``: seconds, for operations whose group names none.

        ``failure_timeout``: seconds by which an operation may end later than its deadline.
        ``observer_allowed``: who else may connect, to ask for the status only.
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
            drop_stale=self.drop_stale,
            ask_status=self._ask_status,
            changed=self._clients_changed,
            forget=self._forget,
        )
        self._uid_allowed = uid_allowed
        self._observer_allowed = observer_allowed
        self._status: StatusService | None = None
        self._scratch = bytearray(READ_BYTES)
        self._sessions: dict[int, ClientSession] = {}
        self._served = False
        self._lifetime: Lifetime | None = None
        self._bound: BoundSocket | None = None
        self._loop: asyncio.AbstractEventLoop

    @property
    def clients(self) -> int:
        """Connections that are open."""
        return sum(not session.gone for session in self._sessions.values())

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

    def _ask_status(self, uid: int, others: bool, answered: Answered) -> None:
        if self._status is None:
            answered(Answer((), ()))
        else:
            self._status.ask(uid, answered, others=others)

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

    # Listening

    def listen(self, name: str, *, mode: int = 0o600) -> None:
        """Bind the ``socket`` setting (a path, or ``@name``) and :meth:`serve` there.

        ``mode``: permissions of the socket file; 0o666 where other users may attach, whom ``uid_allowed`` then judges.

        :raises ConfigError: the socket cannot be had; the message says why.
        """
        self.serve(bind_socket(name, mode=mode))

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
            try:
                sock, _ = self._bound.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors or no memory: the connection waits, and asking again is no use
                self._log.warning("event=accept_failed error=%r", error.strerror)
                self._loop.remove_reader(self._bound.sock.fileno())
                self._loop.call_later(RETRY_ACCEPT, self._accept_again)
                return
            sock.setblocking(False)
            self._take(sock)

    def _accept_again(self) -> None:
        if self._bound is not None:
            self._loop.add_reader(self._bound.sock.fileno(), self._accept)

    def _take(self, sock: socket.socket) -> None:
        if self.clients >= self.limits.clients:
            self._turn_away(
                sock,
                LimitExceeded(
                    f"{self.limits.clients} clients are connected, the most that the agent allows",
                    limit="limits.clients",
                    hint="raise limits.clients",
                ),
            )
            return
        connection = ClientConnection(sock, self.limits, self._scratch)
        observer = not self._uid_allowed(connection.uid)
        if observer and not self._observer_allowed(connection.uid):
            self._turn_away(
                sock,
                AuthenticationError(
                    f"uid {connection.uid} may not attach to this agent, which runs as uid {os.geteuid()}",
                    hint="let the agent's owner allow this user, or start an agent of your own",
                ),
            )
            return
        client = secrets.randbits(63)
        session = ClientSession(client, connection, self._context, observer=observer)
        self._sessions[client] = session
        connection.start(session)
        self._clients_changed()
        self._loop.call_later(self.limits.hello_timeout, self._hello_due, session)

    def _turn_away(self, sock: socket.socket, error: AllReducedError) -> None:
        self._log.warning("event=client_refused reason=%r", error.message)
        with sock:
            try:
                sock.send(encode(Refused(to_wire(error))))  # fits into the buffer of a fresh socket
            except OSError as gone:
                logger.debug("event=refused_client_gone error=%r", gone.strerror)

    def _hello_due(self, session: ClientSession) -> None:
        if not session.attached and not session.gone:
            session.connection.close(f"said no hello within {self.limits.hello_timeout:g} s")

    def drop_stale(self, key: GroupKey, but: int = -1) -> None:
        """Let nobody be refused a rank that a dead process holds: jobs are run again faster than their end is seen."""
        for session in tuple(self._sessions.values()):
            if session.client != but and not session.gone and session.claims(key):
                self.is_connected(session.client)

    def _clients_changed(self) -> None:
        # Only at a connection's end is it known whether the client did more than to ask for the status.
        self._served = self._served or any(session.gone and session.served for session in self._sessions.values())
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
