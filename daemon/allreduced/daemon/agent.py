"""One node's agent, put together: loop, engine, driver, kernels, the plane of clients and the plane of peers."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass

from allreduced.core.addresses import parse_address
from allreduced.core.errors import AgentUnavailable, AllReducedError, ConfigError, ProtocolError
from allreduced.daemon import logs
from allreduced.daemon.arena_table import ArenaLimits, ArenaTable
from allreduced.daemon.descriptors import raise_descriptor_limit
from allreduced.daemon.dialler import Dialler
from allreduced.daemon.diallers import reached
from allreduced.daemon.discovery import Found, discovery
from allreduced.daemon.driver import Driver
from allreduced.daemon.engine.engine import Engine
from allreduced.daemon.engine.limits import Limits as EngineLimits
from allreduced.daemon.kernel_port import NativeKernels
from allreduced.daemon.lifetime import Lifetime
from allreduced.daemon.local_limits import LocalLimits
from allreduced.daemon.local_server import LocalServer
from allreduced.daemon.membership.events import Event as MembershipEvent
from allreduced.daemon.membership.events import FrameArrived
from allreduced.daemon.membership.membership import Membership
from allreduced.daemon.memory_share import default_total
from allreduced.daemon.peers import Peers
from allreduced.daemon.process_state import process_state
from allreduced.daemon.reachability import advertised, check_access, stays_here
from allreduced.daemon.readiness import Readiness
from allreduced.daemon.report import AgentFacts, make_report
from allreduced.daemon.settings import Settings, default_socket, secret_bytes
from allreduced.daemon.status import StatusService, status_wait
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.protocol.peer import Announce
from allreduced.protocol.status import AgentReport
from allreduced.transports.base import LinkOptions, Listener
from allreduced.transports.registry import transport

logger = logging.getLogger("allreduced.agent")

AUTO_LOOP = "asyncio"
"""What ``loop = "auto"`` means. No difference to uvloop was measured; this one is always there."""

MAX_THREADS = 4
"""Reduction threads where the settings do not say; memory bandwidth is used up by then."""

REACH_TIMEOUT = 3.0
"""Seconds to wait for the meeting point before the agent is ready anyway; it is dialled on."""

ANSWER_TIMEOUT = 10.0
"""The same where something listens there already."""

MOST_OPERATIONS = 256
"""Operations of which a status report tells: to look at more would hold up those that run."""

TAKE_OVER_PAUSE = 0.25
"""Seconds between tries to listen at a meeting point whose holder is gone."""


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What is said to one start of an agent and is no setting.

    ``private``: serve one job and stop when its last client is gone. ``join``: ``host:port`` where agents meet.
    ``ready_fd``: inherited descriptor for the ready line. ``on_ready``: called with the clients' socket and the address
    for other agents ("" if there is none). ``tile_bytes``: tests only, tiles smaller than the settings allow; 0 for the
    setting.
    """

    private: bool = False
    join: str | None = None
    ready_fd: int | None = None
    on_ready: Callable[[str, str], None] | None = None
    tile_bytes: int = 0


def run_agent(settings: Settings, options: AgentOptions, environ: Mapping[str, str] | None = None) -> int:
    """Run the agent until it is told to stop; return its exit status, 0 after an orderly end.

    SIGTERM and SIGINT end it in order, a second one at once. Why it did not start is told on ``ready_fd`` too.

    :raises AllReducedError: it could not be started.
    """
    environ = os.environ if environ is None else environ
    node = settings.agent.node or _default_name(private=options.private)
    logs.configure(settings.agent.log_level, node)
    readiness = Readiness(options.ready_fd, environ)
    try:
        raise_descriptor_limit()
        if any(peer.node == node for peer in settings.peers.static):  # by its host name, which settings do not tell
            raise ConfigError(
                f"{node!r} is listed among the peers, and is this agent itself",
                path="peers.static",
                hint="list the other agents only, or give this one another agent.node",
            )
        loop_factory = _loop_factory(settings.agent.loop)
        agent = Agent(node, settings, options, environ, readiness)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(agent.run())
    except AllReducedError as error:
        readiness.failed(error)
        raise


class _ForLinks:
    """Passes the links' events on, but looks first whether local claims still stand. Implements ``LinkSink``.

    A rank may be announced by another node before the end of the process that held it here was noticed.
    """

    def __init__(self, driver: Driver, server: LocalServer) -> None:
        self.engine_event = driver.engine_event
        self.now = driver.now
        self.received = driver.received
        self.receive_cancelled = driver.receive_cancelled
        self.sent = driver.sent
        self.closed = driver.closed
        self._driver = driver
        self._server = server

    def membership_event(self, event: MembershipEvent) -> None:
        """Give the memberships an event."""
        if isinstance(event, FrameArrived) and isinstance(event.frame, Announce):
            self._server.drop_stale(event.frame.key)
        self._driver.membership_event(event)


class Agent:
    """One run of an agent. Owns everything that is open and closes it in the right order."""

    def __init__(
        self, node: str, settings: Settings, options: AgentOptions, environ: Mapping[str, str], readiness: Readiness
    ) -> None:
        self.node = node
        self._settings = settings
        self._options = options
        self._readiness = readiness
        self._socket = settings.agent.socket or default_socket(environ)
        # Grows with each start, so that others know which of two is the later one.
        self._incarnation = (time.time_ns() >> 16 << 16) | secrets.randbits(16)
        self._secret = secret_bytes(settings)
        self._listeners: list[Listener] = []
        self._stop = asyncio.Event()
        self._lifetime: Lifetime | None = None
        self._signals = 0
        self._tasks: set[asyncio.Task[None]] = set()

        limits, timing = settings.limits, settings.timing
        total = limits.arena_bytes or default_total()
        arena_limits = ArenaLimits.from_total(total)
        per_client = min(limits.arena_bytes_per_client or arena_limits.inputs, arena_limits.inputs)
        self._arenas = ArenaTable(ArenaLimits(total, arena_limits.inputs, per_client, limits.arenas_per_client))
        engine = settings.engine
        self._threads = engine.threads or min(len(engine.cpus) or len(os.sched_getaffinity(0)), MAX_THREADS)
        self._kernels = _kernels(self._threads, engine.cpus, engine.nice)
        self._engine = Engine(
            node,
            EngineLimits(
                inline_bytes=limits.inline,
                arena_bytes=total,
                scratch_bytes=max(total // 4, 1),
                window_tiles=engine.window_tiles,
                operations=limits.operations,
                names=limits.names,
                lease_bytes=limits.lease_bytes,
                leases=limits.leases,
                failure_timeout=timing.failure_timeout,
                confirm_seconds=timing.confirm,
            ),
        )
        self._membership = Membership(
            node, self._incarnation, options.tile_bytes or engine.tile_bytes, lambda: secrets.randbits(63), timing
        )
        self._driver = Driver(self._engine, self._membership, self._kernels, self._arenas)
        self._server = LocalServer(
            self._driver,
            self._arenas,
            node=node,
            incarnation=self._incarnation,
            limits=LocalLimits(
                clients=limits.clients,
                requests=limits.requests,
                inline=limits.inline,
                inline_bytes=limits.inline_bytes,
                outgoing_bytes=limits.outgoing_bytes,
                outgoing_messages=limits.outgoing_messages,
                hello_timeout=limits.hello_timeout,
            ),
            default_deadline=settings.failure.deadline,
            failure_timeout=timing.failure_timeout,
        )
        self._started = time.monotonic()
        self._peers = Peers(
            node,
            self._incarnation,
            _ForLinks(self._driver, self._server),
            LinkOptions(
                authenticator=SecretAuthenticator(node, self._incarnation, self._secret),
                flows=settings.peers.flows,
                max_frame=engine.tile_bytes,
                connect_timeout=timing.connect,
                handshake_timeout=timing.connect,
                max_pending_handshakes=limits.pending_handshakes,
            ),
            transport,
            timing=timing,
        )
        self._status = StatusService(self._report, self._peers, wait=status_wait(timing.failure_timeout))
        self._server.use_status(self._status)
        self._peers.on_status = self._status.frame_arrived

    def _report(self, asker: int) -> AgentReport:
        """Return what the user ``asker`` is told about this agent."""
        now = self._driver.now()
        return make_report(
            asker,
            AgentFacts(
                self.node, self._incarnation, os.getpid(), os.geteuid(), now - self._started, self._server.served
            ),
            self._engine.snapshot(now, MOST_OPERATIONS),
            self._membership.snapshot(),
            self._peers.view(),
            lambda client: process_state(self._server.process_of(client)).value,
            now,
        )

    async def run(self) -> int:
        """Start, serve until told to stop, end in order.

        :raises AllReducedError: it could not be started; nothing is left open.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        self._driver.attach(self._server, self._peers)
        self._driver.start()
        try:
            await self._start()
            await self._stop.wait()
            self._readiness.stopping()
            await self._drain()
        finally:
            await self._close()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        return 0

    # Starting

    async def _start(self) -> None:
        join = self._options.join or ""
        found = await discovery(self._settings, join).find(self._listen)
        listen = ""
        if found.listener is not None:
            targets = [target.address for target in found.targets]
            where = parse_address(found.listener.address)
            listen = await advertised(where, self._settings.peers.advertise, targets)
        self._peers.start(listen)
        diallers = [self._peers.dial(target) for target in found.targets]
        if join:
            await self._meet(found, diallers)
        if self._options.private:
            self._lifetime = Lifetime(self._alone)
            self._server.report_to(self._lifetime)
        self._server.listen(self._socket)
        address = listen or (found.listener.address if found.listener is not None else "")
        self._readiness.ready(self._socket, address)
        if self._options.on_ready is not None:
            self._options.on_ready(self._socket, address)
        logger.info(
            "event=ready socket=%s listen=%s threads=%d incarnation=%d",
            self._socket,
            address or "-",
            self._threads,
            self._incarnation,
        )

    async def _listen(self, address: str) -> Listener:
        parsed = parse_address(address, path="peers.listen", any_port=True)
        local = await stays_here(parsed)
        check_access(parsed, local=local, secret=self._secret, insecure=self._settings.security.insecure)
        listener = await self._peers.listen(str(parsed))
        self._listeners.append(listener)
        return listener

    async def _meet(self, found: Found, diallers: list[Dialler]) -> None:
        try:
            await reached(diallers, ANSWER_TIMEOUT if found.taken else REACH_TIMEOUT)
        except ProtocolError as error:
            where = found.targets[0].address
            raise ConfigError(
                f"{where}, where the agents of this job are to meet, is used by something that is no agent",
                path="join",
                hint=f"choose another port ({error.message})",
            ) from error
        if found.taken:
            self._spawn(self._take_over(found.taken, diallers[0]))

    async def _take_over(self, meeting: str, dialler: Dialler) -> None:
        """Listen at the meeting point once its holder is gone, which may have been the agent of an earlier job."""
        while True:
            await dialler.away()
            try:
                await self._listen(meeting)
            except ConfigError as error:
                if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                    raise
                await asyncio.sleep(TAKE_OVER_PAUSE)
                continue
            await dialler.close()
            logger.info("event=meeting_point_taken_over address=%s", meeting)
            return

    def _alone(self) -> None:
        logger.info("event=no_clients")
        self._stop.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("event=task_failed error=%r", str(error), exc_info=error)

    # Ending

    def _signalled(self) -> None:
        self._signals += 1
        if self._signals > 1:
            logger.warning("event=stopped_at_once")
            logging.shutdown()
            os._exit(1)
        logger.info("event=stopping clients=%d operations=%d", self._server.clients, self._driver.in_flight)
        self._stop.set()

    async def _drain(self) -> None:
        self._server.stop_listening()
        await self._driver.drain(self._settings.drain_timeout)

    async def _close(self) -> None:
        if self._lifetime is not None:
            self._lifetime.close()
        self._status.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        # While there are links, the address must not refuse connections, which would prove that this agent is dead.
        await self._peers.close(self._settings.failure.failure_timeout)
        for listener in self._listeners:
            await listener.close()
        await self._server.close()
        self._driver.close()
        self._kernels.close()
        self._server.release_memory()
        await self._arenas.close()


def _kernels(threads: int, cpus: Sequence[int], nice: int) -> NativeKernels:
    try:
        return NativeKernels(threads, cpus, nice)
    except ImportError as error:
        raise AgentUnavailable(
            f"the native kernels cannot be loaded: {error}",
            hint="install allreduced again (pip install -e . builds them)",
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"the reduction threads cannot be started: {error}", path="engine") from error


def _default_name(*, private: bool) -> str:
    """Return the host's name; several private agents may run on one host."""
    host = socket.gethostname() or "node"
    return f"{host}-{os.getpid()}" if private else host


def _loop_factory(choice: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if (AUTO_LOOP if choice == "auto" else choice) == "asyncio":
        return asyncio.new_event_loop
    try:
        import uvloop
    except ImportError:
        if choice == "auto":
            return asyncio.new_event_loop
        raise ConfigError(
            "uvloop is not installed", path="agent.loop", hint="pip install 'allreduced[agent]'"
        ) from None
    return uvloop.new_event_loop
