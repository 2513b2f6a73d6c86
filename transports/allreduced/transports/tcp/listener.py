"""Accepts connections, authenticates them, and puts the flows of each link together."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Final

from allreduced.core.errors import AllReducedError, ConfigError, ProtocolError
from allreduced.core.log_limit import LogLimit
from allreduced.transports.base import Handshake, LinkAccepted, LinkOptions, Listener
from allreduced.transports.tcp.address import SockAddr, parse, resolve, text
from allreduced.transports.tcp.authenticate import authenticate
from allreduced.transports.tcp.link import TcpLink
from allreduced.transports.tcp.sockets import prepare

_log = logging.getLogger("allreduced.transports.tcp")

_BACKLOG: Final = 256
_ACCEPTS_PER_WAKE: Final = 32
_PAUSE: Final = 0.5
"""Seconds without accepting after the process ran out of descriptors."""


class _Assembly:
    """A link whose control flow is authenticated and whose data flows are on their way."""

    def __init__(self, control: Handshake) -> None:
        self.control = control  # keeps the session known to the authenticator
        self.flows: dict[int, tuple[socket.socket, bytes]] = {}
        self.complete = asyncio.get_running_loop().create_future()

    def add(self, sock: socket.socket, handshake: Handshake) -> None:
        if handshake.flow in self.flows or self.complete.done():
            raise ProtocolError(f"data flow {handshake.flow} of one link twice")
        self.flows[handshake.flow] = (sock, handshake.trailing)
        if len(self.flows) == self.control.flows:
            self.complete.set_result(None)


class TcpListener(Listener):
    """The one listening port of an agent."""

    def __init__(self, sock: socket.socket, accepted: LinkAccepted, options: LinkOptions) -> None:
        self.address = text(sock.getsockname())
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._fd = sock.fileno()
        self._accepted = accepted
        self._options = options
        self._serving: set[asyncio.Task[None]] = set()
        self._unfinished: dict[asyncio.Task[None], None] = {}
        """Connections that are not authenticated yet, oldest first."""
        self._assemblies: dict[bytes, _Assembly] = {}
        """Authenticated links without all of their data flows, oldest first. As bounded as unfinished handshakes."""
        self._drops = LogLimit(_log)
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
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors or memory: the backlog stays readable, so wait instead of spinning.
                _log.error("event=accept_failed address=%s error=%r", self.address, error)
                self._loop.remove_reader(self._fd)
                self._paused = self._loop.call_later(_PAUSE, self._resume)
                return
            task = self._loop.create_task(self._serve(sock, text(address)))
            self._serving.add(task)
            self._unfinished[task] = None
            task.add_done_callback(self._served)
            if len(self._unfinished) > self._options.max_pending_handshakes:
                oldest = next(iter(self._unfinished))
                del self._unfinished[oldest]
                oldest.cancel("too many unfinished handshakes")

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._fd, self._acceptable)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._unfinished.pop(task, None)

    async def _serve(self, sock: socket.socket, source: str) -> None:
        """Authenticate one connection and bring its flow to its link. Whatever goes wrong ends this connection only."""
        kept = False
        try:
            local = text(sock.getsockname())  # the system forgets it when the peer resets the connection
            prepare(sock, self._options.max_frame)
            handshake = self._options.authenticator.answer()
            async with asyncio.timeout(self._options.handshake_timeout):
                await authenticate(sock, handshake)
            task = asyncio.current_task()
            if task is not None:
                self._unfinished.pop(task, None)
            if handshake.flow:
                self._join(sock, handshake)
                kept = True
            else:
                kept = await self._assemble(sock, handshake, local, source)
        except TimeoutError:
            self._drop(source, "it did not finish its handshake in time")
        except ConnectionError as error:  # the other side thought better of it, as an agent does that stops
            self._drop(source, str(error), logging.INFO)
        except (AllReducedError, OSError) as error:
            self._drop(source, str(error))
        except asyncio.CancelledError:
            if self._open:
                self._drop(source, "too many unfinished handshakes")
        finally:
            if not kept:
                sock.close()

    def _join(self, sock: socket.socket, handshake: Handshake) -> None:
        assembly = self._assemblies.get(handshake.session)
        if assembly is None:
            raise ProtocolError("a data flow of a link that is not being made here")
        assembly.add(sock, handshake)

    async def _assemble(self, sock: socket.socket, control: Handshake, local: str, source: str) -> bool:
        """Wait for the data flows of a link and hand it over. Return true if the link owns the sockets now."""
        if len(self._assemblies) >= self._options.max_pending_handshakes:
            next(iter(self._assemblies.values())).complete.cancel()
        assembly = self._assemblies[control.session] = _Assembly(control)
        kept = False
        try:
            try:
                async with asyncio.timeout(self._options.handshake_timeout):
                    await assembly.complete
            except TimeoutError:
                self._drop(source, f"{len(assembly.flows)} of {control.flows} data flows of its link came in time")
                return False
            data = [assembly.flows[flow] for flow in sorted(assembly.flows)]
            link = TcpLink(
                control.peer,
                [(sock, control.trailing), *data],
                initiator=False,
                local_address=local,
                remote_address=source,
                max_frame=self._options.max_frame,
            )
            kept = True
        finally:
            del self._assemblies[control.session]
            if not kept:
                for other, _ in assembly.flows.values():
                    other.close()
        try:
            events = self._accepted(link)
        except Exception as error:  # whatever it raises refuses the link
            _log.warning(
                "event=link_refused peer=%s from=%s error=%s",
                link.peer.node,
                source,
                error,
                exc_info=not isinstance(error, AllReducedError),
            )
            link.broken("it was refused here")
        else:
            link.start(events)
        return True

    def _drop(self, source: str, reason: str, level: int = logging.WARNING) -> None:
        self._drops.log(level, "event=connection_dropped from=%s reason=%r", source, reason)


async def listen(address: str, accepted: LinkAccepted, options: LinkOptions) -> TcpListener:
    """Listen at ``tcp://host:port``. See ``Transport.listen``."""
    host, port = parse(address)
    try:
        found = await resolve(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen at {address}: {error.strerror or error}") from error
    family, target = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and target[0] == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # the wildcard takes IPv4 too
        _bind(sock, target, address)
        return TcpListener(sock, accepted, options)
    except BaseException:
        sock.close()
        raise


def _bind(sock: socket.socket, target: SockAddr, address: str) -> None:
    try:
        sock.bind(target)
        sock.listen(_BACKLOG)
    except OSError as error:
        reason, hint = error.strerror or str(error), ""
        if error.errno == errno.EADDRINUSE:
            reason, hint = "the port is in use", "stop the agent that holds it, or choose another port"
        elif error.errno == errno.EADDRNOTAVAIL:
            reason, hint = "this machine does not have that address", "listen at one of its own, or at 0.0.0.0"
        elif error.errno == errno.EACCES:
            reason, hint = "this user may not use that port", "choose one above 1023"
        raise ConfigError(f"cannot listen at {address}: {reason}", hint=hint) from error
