"""The life of one node's agent: it starts its parts, serves until it is told to stop, and ends them in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from allreduced.core.errors import AllReducedError, ConfigError
from allreduced.daemon import logs
from allreduced.daemon.descriptors import raise_descriptor_limit
from allreduced.daemon.entrance import Entrance
from allreduced.daemon.lifetime import Lifetime
from allreduced.daemon.parts import Parts, assemble
from allreduced.daemon.readiness import Readiness
from allreduced.daemon.settings import Settings, default_socket

logger = logging.getLogger("allreduced.agent")

AUTO_LOOP = "asyncio"
"""What ``loop = "auto"`` means. No difference to uvloop was measured; this one is always there."""


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
        parts = assemble(node, settings, tile_bytes=options.tile_bytes)
        agent = Agent(parts, settings, options, environ, readiness)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(agent.run())
    except AllReducedError as error:
        readiness.failed(error)
        raise


class Agent:
    """One run of an agent. Owns everything that is open and closes it in the right order."""

    def __init__(
        self, parts: Parts, settings: Settings, options: AgentOptions, environ: Mapping[str, str], readiness: Readiness
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._options = options
        self._readiness = readiness
        self._socket = settings.agent.socket or default_socket(environ)
        self._entrance = Entrance(parts.peers, settings, secret=parts.secret, join=options.join or "")
        self._stop = asyncio.Event()
        self._lifetime: Lifetime | None = None
        self._signals = 0

    async def run(self) -> int:
        """Start, serve until told to stop, end in order.

        :raises AllReducedError: it could not be started; nothing is left open.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        self._parts.driver.attach(self._parts.server, self._parts.peers)
        self._parts.driver.start()
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
        parts = self._parts
        address = await self._entrance.open()
        if self._options.private:
            self._lifetime = Lifetime(self._alone)
            parts.server.report_to(self._lifetime)
        parts.server.listen(self._socket)
        self._readiness.ready(self._socket, address)
        if self._options.on_ready is not None:
            self._options.on_ready(self._socket, address)
        logger.info(
            "event=ready socket=%s listen=%s threads=%d incarnation=%d",
            self._socket,
            address or "-",
            parts.threads,
            parts.incarnation,
        )

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
        self._parts.server.stop_listening()
        await self._parts.driver.drain(self._settings.drain_timeout)

    async def _close(self) -> None:
        parts = self._parts
        if self._lifetime is not None:
            self._lifetime.close()
        parts.status.close()
        await self._entrance.stop()
        # While there are links, the address must not refuse connections, which would prove that this agent is dead.
        await parts.peers.close(self._settings.failure.failure_timeout)
        await self._entrance.close()
        await parts.server.close()
        parts.driver.close()
        parts.kernels.close()
        parts.server.release_memory()
        await parts.arenas.close()


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
