"""The life of one node's agent: it starts its parts, serves until it is told to stop, and ends them in order."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import logging
import os
import signal
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

from allreduced.core.errors import AllReducedError
from allreduced.daemon import logs
from allreduced.daemon.access import access_from, socket_group, socket_mode
from allreduced.daemon.descriptors import raise_descriptor_limit
from allreduced.daemon.ends import Ends
from allreduced.daemon.entrance import Entrance
from allreduced.daemon.event_loop import loop_factory
from allreduced.daemon.handed_socket import handed_socket
from allreduced.daemon.lifetime import Lifetime
from allreduced.daemon.parts import Parts, assemble, use_settings
from allreduced.daemon.pulse import Pulse
from allreduced.daemon.readiness import Readiness
from allreduced.daemon.reloading import Reloading
from allreduced.daemon.service_manager import ServiceManager
from allreduced.daemon.settings import Settings, default_socket
from allreduced.daemon.socket_path import BoundSocket, bind_socket
from allreduced.daemon.start_check import check_start, node_of

logger = logging.getLogger("allreduced.agent")

CLOSE_TIMEOUT = 10.0
"""Seconds that the end takes at most where no peer and no operation is waited for."""


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What is said to one start of an agent and is no setting.

    ``private``: serve one job and stop when its last client is gone. ``join``: ``host:port`` where agents meet.
    ``ready_fd``: inherited descriptor for the ready line. ``on_ready``: called with the clients' socket and the address
    for other agents ("" if there is none). ``reload``: reads the settings again, at SIGHUP; None without a file.
    ``tile_bytes``: tests only, tiles smaller than the settings allow; 0 for the setting.
    """

    private: bool = False
    join: str | None = None
    ready_fd: int | None = None
    on_ready: Callable[[str, str], None] | None = None
    reload: Callable[[], Settings] | None = None
    tile_bytes: int = 0


def run_agent(settings: Settings, options: AgentOptions, environ: MutableMapping[str, str] | None = None) -> int:
    """Run the agent until it is told to stop; return its exit status, 0 after an orderly end.

    SIGTERM and SIGINT end it in order, a second one at once. SIGHUP reloads the settings where ``options.reload`` is
    given, and ends it in order elsewhere. Why it did not start is told on ``ready_fd`` too.

    :raises AllReducedError: it could not be started.
    """
    environ = os.environ if environ is None else environ
    node = node_of(settings, private=options.private)
    logs.configure(settings.agent.log_level, node, settings.agent.log_format, environ)
    readiness = Readiness(options.ready_fd)
    manager = ServiceManager(environ)
    if manager.watchdog is not None:
        faulthandler.enable()  # the watchdog's SIGABRT tells then where the agent hangs
    try:
        raise_descriptor_limit()
        read = check_start(node, settings, had=settings)  # what is left out is about to be had
        bound = handed_socket(environ)
        parts = assemble(node, settings, read, tile_bytes=options.tile_bytes)
        agent = Agent(parts, settings, options, bound or settings.agent.socket or default_socket(environ), manager)
        with asyncio.Runner(loop_factory=loop_factory(settings.agent.loop)) as runner:
            return runner.run(agent.run(readiness))
    except AllReducedError as error:
        readiness.failed(error)
        raise


class Agent:
    """One run of an agent. Owns everything that is open and closes it in the right order.

    ``socket``: where clients come, or what is bound there already.
    """

    def __init__(
        self,
        parts: Parts,
        settings: Settings,
        options: AgentOptions,
        socket: str | BoundSocket,
        manager: ServiceManager,
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._options = options
        self._manager = manager
        self._socket = socket
        guarded = bool(parts.secret) or parts.credentials is not None
        self._entrance = Entrance(parts.peers, settings, guarded=guarded, join=options.join or "")
        self._stop = asyncio.Event()
        self._bound: BoundSocket | None = None
        self._reloading: Reloading | None = None
        self._ends = Ends()
        self._started = False
        self._hung_up = False
        self._signals = 0

    async def run(self, readiness: Readiness) -> int:
        """Start, serve until told to stop, end in order; return 1 where the end was not in order, else 0.

        :raises AllReducedError: it could not be started; nothing is left open.
        """
        self._watch_for_signals()
        self._own_parts()
        self._parts.driver.attach(self._parts.server, self._parts.peers)
        self._parts.driver.start()
        failed: tuple[str, ...] = ()
        try:
            await self._start(readiness)
            await self._stop.wait()
            await self._drain()
        finally:
            failed = await self._ends.close()
        return 1 if failed else 0

    # Starting

    def _own_parts(self) -> None:
        """Let the parts end with the agent, the last one here first."""
        parts, ends = self._parts, self._ends
        self._pulse = Pulse(self._manager, self._status)
        ends.push("pulse", self._pulse.close)
        if parts.monitoring is not None:
            ends.push("monitoring", parts.monitoring.close)
        ends.push("arenas", parts.arenas.close)
        ends.push("memory", parts.server.release_memory)
        ends.push("kernels", parts.kernels.close)
        ends.push("driver", parts.driver.close)
        ends.push("server", parts.server.close)
        ends.push("entrance", self._entrance.close)
        # While there are links, the address must not refuse connections, which would prove that this agent is dead.
        ends.push("peers", lambda: parts.peers.close(self._settings.failure.failure_timeout))
        ends.push("discovery", self._entrance.stop)
        ends.push("status", parts.status.close)

    async def _start(self, readiness: Readiness) -> None:
        parts = self._parts
        # First, so that a second agent at this socket disturbs nobody; clients wait there until they are accepted.
        bound = self._bind(self._socket) if isinstance(self._socket, str) else self._socket
        try:
            if parts.monitoring is not None:
                await parts.monitoring.open()
            address = await self._entrance.open()
        except BaseException:
            bound.close()
            raise
        self._bound = bound
        parts.server.serve(bound)
        if parts.credentials is not None:
            watching = asyncio.get_running_loop().create_task(parts.credentials.watch())
            self._ends.push("certificates", lambda: _cancelled(watching))
        if self._reloading is not None:
            self._ends.push("reload", self._reloading.close)
        if self._options.private:
            lifetime = Lifetime(self._alone)
            self._ends.push("lifetime", lifetime.close)
            parts.server.report_to(lifetime)
        if parts.monitoring is not None:
            parts.monitoring.serving()
        self._pulse.start()
        logger.info(
            "event=ready socket=%s listen=%s threads=%d incarnation=%d",
            bound.name,
            address or "-",
            parts.threads,
            parts.incarnation,
        )
        readiness.ready(bound.name, address)
        self._manager.ready(self._status())
        if self._options.on_ready is not None:
            self._options.on_ready(bound.name, address)
        self._started = True
        if self._hung_up:
            self._hang_up()

    def _bind(self, name: str) -> BoundSocket:
        access = self._settings.access
        return bind_socket(name, mode=socket_mode(access), group=socket_group(access))

    # Running

    def _status(self) -> str:
        """Return for people what the agent does."""
        parts = self._parts
        peers = len(parts.peers.view())
        missing = [node or "one without a name" for node, _ in parts.peers.not_reached()]
        said = [
            "stopping" if self._stop.is_set() else "serving",
            f"clients: {parts.server.served}",
            f"operations in flight: {parts.driver.in_flight}",
            f"agents connected: {peers}" + (f", not reached: {', '.join(missing)}" if missing else ""),
        ]
        if self._reloading is not None and self._reloading.note:
            said.insert(0, self._reloading.note)
        return "; ".join(said)

    def _watch_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
            self._ends.push("signals", functools.partial(_no_handler, number))
        self._watch_for_hang_up()

    def _watch_for_hang_up(self) -> None:
        """Reload at SIGHUP, where there is a file; a terminal that is closed says SIGHUP too, and ends the agent."""
        if self._options.reload is not None and not self._options.private and not os.isatty(0):
            credentials = self._parts.credentials
            self._reloading = Reloading(
                self._settings,
                self._read_settings,
                self._use_settings,
                self._manager,
                self._status,
                prepare=(self._read_access, *((credentials.prepare,) if credentials is not None else ())),
            )
        elif signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: it is to outlive the terminal
            return
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hang_up)
        self._ends.push("signals", functools.partial(_no_handler, signal.SIGHUP))

    def _hang_up(self) -> None:
        if self._stop.is_set():
            return  # both the terminal and the shell tell that the terminal is gone
        if self._reloading is None:
            self._signalled()
        elif self._started:
            self._reloading.ask()
        else:
            self._hung_up = True

    def _read_settings(self) -> Settings:
        """Read the settings again, in a thread.

        :raises AllReducedError: an agent would not start with them.
        """
        assert self._options.reload is not None
        settings = self._options.reload()
        check_start(node_of(settings), settings, had=self._settings)
        return settings

    def _read_access(self, settings: Settings) -> Callable[[], None]:
        access = access_from(settings.access, os.geteuid())
        required = settings.access.job_secrets == "required"
        mode = socket_mode(settings.access)

        def use() -> None:
            self._parts.server.use_access(access, job_secrets=required)
            if self._bound is not None:
                try:
                    self._bound.use_mode(mode)
                except OSError as error:
                    logger.error(
                        "event=socket_mode_failed socket=%s mode=%s error=%r", self._bound.name, f"{mode:03o}", error
                    )

        return use

    def _use_settings(self, settings: Settings) -> None:
        self._settings = settings
        use_settings(self._parts, settings)
        self._entrance.use_settings(settings)

    # Ending

    def _alone(self) -> None:
        logger.info("event=no_clients")
        self._stop.set()

    def _signalled(self) -> None:
        self._signals += 1
        if self._signals > 1:
            logger.warning("event=stopped_at_once")
            logging.shutdown()
            os._exit(1)
        parts = self._parts
        logger.info("event=stopping clients=%d operations=%d", parts.server.clients, parts.driver.in_flight)
        self._stop.set()

    async def _drain(self) -> None:
        settings = self._settings
        self._manager.stopping(
            self._status(), settings.drain_timeout + settings.failure.failure_timeout + CLOSE_TIMEOUT
        )
        if self._parts.monitoring is not None:
            self._parts.monitoring.draining()
        self._parts.server.stop_listening()
        await self._parts.driver.drain(settings.drain_timeout)


def _no_handler(number: int) -> None:
    asyncio.get_running_loop().remove_signal_handler(number)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
