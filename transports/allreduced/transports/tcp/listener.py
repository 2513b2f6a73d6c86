"""Accepts connections, authenticates them, and puts the flows of each link together."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from functools import partial
from typing import Final

from allreduced.core.accept_budget import BURST, AcceptBudget
from allreduced.core.errors import AllReducedError, AuthenticationError, ConfigError, ProtocolError
from allreduced.core.log_limit import LogLimit
from allreduced.core.refusals import Kind, Plane, kind_of, refused
from allreduced.core.resolver import look_up
from allreduced.transports.base import Handshake, LinkAccepted, LinkOptions, Listener
from allreduced.transports.tcp import wire
from allreduced.transports.tcp.address import SCHEME, parse, text
from allreduced.transports.tcp.authenticate import authenticate
from allreduced.transports.tcp.conversation import Conversation
from allreduced.transports.tcp.link import FlowLink, TcpLink
from allreduced.transports.tcp.negotiator import Accepted, Negotiator, TcpOnly
from allreduced.transports.tcp.secure import secured_or_plain
from allreduced.transports.tcp.sockets import prepare
from allreduced.transports.tcp.stream import PlainStream, Stream

_log = logging.getLogger("allreduced.transports.tcp")

BACKLOG: Final = 128
"""Connections that wait in the kernel's queue."""

_ACCEPTS_PER_WAKE: Final = 32
"""Connections that are accepted before everything else has its turn."""

_LINKS_PER_HANDSHAKE: Final = 4
"""Links without all of their data flows, for each unfinished handshake that there may be. Their agents are known, and
their data flows wait behind those of others in the kernel's queue."""

REFUSED_AGAIN: Final = 60.0
"""Seconds in which it is said once that a host is refused for a reason."""

MAX_REFUSED: Final = 256
"""Hosts and reasons that are remembered for that."""

_PAUSE: Final = 0.5
"""Seconds without accepting after the process ran out of descriptors."""


class _Assembly:
    """A link whose control flow is authenticated and whose data flows are on their way."""

    def __init__(self, control: Handshake) -> None:
        self.control = control  # keeps the session known to the authenticator
        self.flows: dict[int, Stream] = {}
        self.complete = asyncio.get_running_loop().create_future()

    def add(self, stream: Stream, handshake: Handshake) -> None:
        if handshake.flow in self.flows or self.complete.done():
            raise ProtocolError(f"data flow {handshake.flow} of one link twice")
        self.flows[handshake.flow] = stream
        if len(self.flows) == self.control.flows:
            self.complete.set_result(None)


class TcpListener(Listener):
    """The one listening port of an agent."""

    def __init__(
        self,
        sock: socket.socket,
        accepted: LinkAccepted,
        options: LinkOptions,
        scheme: str = SCHEME,
        negotiator: Negotiator | None = None,
    ) -> None:
        self.address = text(sock.getsockname(), scheme)
        self._scheme = scheme
        self._negotiator = negotiator or TcpOnly()
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._fd = sock.fileno()
        self._accepted = accepted
        self._options = options
        self._serving: set[asyncio.Task[None]] = set()
        self._unfinished: dict[asyncio.Task[None], None] = {}
        """Connections that are not authenticated yet, oldest first."""
        self._assemblies: dict[bytes, _Assembly] = {}
        """Authenticated links without all of their data flows, oldest first. Bounded, too."""
        self._drops = LogLimit(_log)
        self._refused: dict[tuple[str, str], float] = {}
        """Hosts whose agents were refused, why, and when that was said."""
        # At once half of those that may be unfinished: a crowd of honest agents must not end each other's handshakes.
        self._budget = AcceptBudget(burst=min(BURST, max(1, options.max_pending_handshakes // 2)))
        self._paused: asyncio.TimerHandle | None = None
        self._open = True
        self._loop.add_reader(self._fd, self._acceptable)

    async def close(self) -> None:
        """Stop accepting and drop unfinished handshakes; links made from it live on."""
        if self._open:
            self._open = False
            if self._paused is not None:
                self._paused.cancel()
            self._loop.remove_reader(self._fd)
            self._sock.close()
            for task in self._serving:
                task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    def _acceptable(self) -> None:
        for _ in range(_ACCEPTS_PER_WAKE):
            pause = self._budget.wait(self._loop.time())
            if pause:
                self._pause(pause)
                return
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors or memory: the backlog stays readable, so wait instead of spinning.
                _log.error("event=accept_failed address=%s error=%r", self.address, error)
                self._pause(_PAUSE)
                return
            self._budget.take(self._loop.time())
            task = self._loop.create_task(self._serve(sock, text(address, self._scheme)))
            self._serving.add(task)
            self._unfinished[task] = None
            task.add_done_callback(partial(self._served, sock))
            if len(self._unfinished) > self._options.max_pending_handshakes:
                oldest = next(iter(self._unfinished))
                del self._unfinished[oldest]
                oldest.cancel("too many unfinished handshakes")

    def _pause(self, seconds: float) -> None:
        """Leave connections in the kernel's queue for a while."""
        self._loop.remove_reader(self._fd)
        self._paused = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._fd, self._acceptable)

    def _served(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._unfinished.pop(task, None)
        if task.cancelled():
            sock.close()  # it was cancelled before it began

    async def _serve(self, sock: socket.socket, source: str) -> None:
        """Authenticate one connection and bring its flow to its link. Whatever goes wrong ends this connection only."""
        known = kept = False
        stream: Stream = PlainStream(sock)
        try:
            here = sock.getsockname()  # the system forgets it when the peer resets the connection
            prepare(sock, self._options.max_frame)
            async with asyncio.timeout(self._options.handshake_timeout):
                stream = await secured_or_plain(sock, self._options.credentials)
                handshake = self._options.authenticator.answer(stream.channel)
                await authenticate(stream, handshake)
            known = True
            self._budget.give_back()
            task = asyncio.current_task()
            if task is not None:
                self._unfinished.pop(task, None)
            if handshake.flow:
                self._join(stream, handshake)
                kept = True
            else:
                local = text(here, self._scheme)
                kept = await self._assemble(Accepted(stream, handshake, here[0], local, source, self._options))
        except TimeoutError:
            self._drop(source, Kind.TIMEOUT, "it did not finish its handshake in time")
        except ConnectionError as error:  # the other side thought better of it, as an agent does that stops
            self._drop(source, Kind.HUNG_UP, str(error), logging.INFO)
        except AuthenticationError as error:
            self._refuse(source, kind_of(error), str(error))
        except (AllReducedError, OSError) as error:
            self._drop(source, kind_of(error), str(error))
        except asyncio.CancelledError:
            if self._open:
                self._drop(source, Kind.LIMIT, "too many unfinished handshakes")
        finally:
            if not kept:
                stream.close(reset=False)
            if known and not kept:
                self._budget.take(self._loop.time())  # a good one that went bad

    def _join(self, stream: Stream, handshake: Handshake) -> None:
        assembly = self._assemblies.get(handshake.session)
        if assembly is None:
            raise ProtocolError("a data flow of a link that is not being made here")
        assembly.add(stream, handshake)

    async def _assemble(self, accepted: Accepted) -> bool:
        """Wait for the data flows of a link and hand it over. Return true if the link owns the sockets now."""
        control = accepted.control
        if len(self._assemblies) >= _LINKS_PER_HANDSHAKE * self._options.max_pending_handshakes:
            next(iter(self._assemblies.values())).complete.cancel()
        assembly = self._assemblies[control.session] = _Assembly(control)
        link: FlowLink | None = None
        try:
            try:
                async with asyncio.timeout(self._options.handshake_timeout):
                    link = await self._make(accepted, assembly)
            except TimeoutError:
                self._drop(
                    accepted.remote,
                    Kind.TIMEOUT,
                    f"{len(assembly.flows)} of {control.flows} data flows of its link came in time",
                )
                return False
        finally:
            del self._assemblies[control.session]
            if not isinstance(link, TcpLink):
                for other in assembly.flows.values():
                    other.close(reset=False)
        try:
            events = self._accepted(link)
        except Exception as error:  # whatever it raises refuses the link
            refused(Plane.PEERS, kind_of(error, Kind.NAME))
            _log.warning(
                "event=link_refused peer=%s from=%s error=%s",
                link.peer.node,
                accepted.remote,
                error,
                exc_info=not isinstance(error, AllReducedError),
            )
            link.broken("it was refused here")
        else:
            link.start(events)
        return True

    async def _make(self, accepted: Accepted, assembly: _Assembly) -> FlowLink:
        """Return the link, once its data flows are there or it was agreed how its data goes instead."""
        conversation = Conversation(accepted.stream)
        reason = "" if isinstance(self._negotiator, TcpOnly) else "the other end uses TCP only"
        if await self._asks(conversation, assembly):
            made = await self._negotiator.answer(accepted, conversation)
            if not isinstance(made, str):
                return made
            reason = made
        await assembly.complete
        if self._negotiator.required:
            raise ProtocolError(f"data flows over TCP, where this agent takes {self._scheme}:// only")
        link = TcpLink(
            accepted.control.peer,
            conversation.end(),
            [assembly.flows[flow] for flow in sorted(assembly.flows)],
            initiator=False,
            local_address=accepted.local,
            remote_address=accepted.remote,
            max_frame=self._options.max_frame,
            version=accepted.control.version,
        )
        link.fallback_reason = reason
        return link

    async def _asks(self, conversation: Conversation, assembly: _Assembly) -> bool:
        """Return true if the dialler wants to negotiate, false once all its data flows are there."""
        asking = self._loop.create_task(conversation.next_kind())
        try:
            await asyncio.wait({asking, assembly.complete}, return_when=asyncio.FIRST_COMPLETED)
            if assembly.complete.done():
                return False
            return await asking == wire.NEGOTIATE
        finally:
            asking.cancel()
            await asyncio.wait({asking})
            if not asking.cancelled():
                asking.exception()  # whoever reads the control flow next finds the same

    def _refuse(self, source: str, kind: Kind, reason: str) -> None:
        """Count that somebody is refused, who may try again and again, and say so once in a while."""
        who = (parse(source, self._scheme)[0], reason)
        now = self._loop.time()
        self._refused = {key: at for key, at in self._refused.items() if now - at < REFUSED_AGAIN}
        if who in self._refused or len(self._refused) >= MAX_REFUSED:
            refused(Plane.PEERS, kind)  # but nothing is said
        else:
            self._refused[who] = now
            self._drop(source, kind, reason)

    def _drop(self, source: str, kind: Kind, reason: str, level: int = logging.WARNING) -> None:
        refused(Plane.PEERS, kind)
        self._drops.log(level, "event=connection_dropped from=%s reason=%r", source, reason)


async def listen(
    address: str,
    accepted: LinkAccepted,
    options: LinkOptions,
    scheme: str = SCHEME,
    negotiator: Negotiator | None = None,
) -> TcpListener:
    """Listen at ``tcp://host:port``, or under another scheme. See ``Transport.listen``.

    ``negotiator`` answers diallers that want another way for their data; without one all goes by TCP.
    """
    sock = await bound(address, scheme)
    try:
        try:
            sock.listen(BACKLOG)
        except OSError as error:
            raise _cannot_listen(address, error) from error
        return TcpListener(sock, accepted, options, scheme, negotiator)
    except BaseException:
        sock.close()
        raise


async def bound(address: str, scheme: str = SCHEME) -> socket.socket:
    """Return a socket that has the address, and does not listen yet: nobody else is kept from it.

    :raises ConfigError: the address cannot be had; the cause is the system's error.
    """
    host, port = parse(address, scheme)
    _check_interface(host, address)
    try:
        found = await look_up(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen at {address}: {error.strerror or error}") from error
    family, target = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and target[0] == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # the wildcard takes IPv4 too
        try:
            sock.bind(target)
        except OSError as error:
            raise _cannot_listen(address, error) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _check_interface(host: str, address: str) -> None:
    """Name the interface that an address is of and this machine does not have: the system only says that it fails."""
    _, percent, interface = host.partition("%")
    if percent and not interface.isdigit():
        try:
            socket.if_nametoindex(interface)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {address}: this machine has no interface {interface!r}", hint="ip link lists them"
            ) from error


def _cannot_listen(address: str, error: OSError) -> ConfigError:
    reason, hint = error.strerror or str(error), ""
    if error.errno == errno.EADDRINUSE:
        reason, hint = "the port is in use", "stop the agent that holds it, or choose another port"
    elif error.errno == errno.EADDRNOTAVAIL:
        reason, hint = "this machine does not have that address", "listen at one of its own, or at 0.0.0.0"
    elif error.errno == errno.EACCES:
        reason, hint = "this user may not use that port", "choose one above 1023"
    return ConfigError(f"cannot listen at {address}: {reason}", hint=hint)
