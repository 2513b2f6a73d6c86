"""The parts of an agent, made from its settings and connected with each other. Nothing runs, listens or dials yet."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allreduced.core.release import release
from allreduced.daemon import logs
from allreduced.daemon.access import access_from
from allreduced.daemon.arena_table import ArenaLimits, ArenaTable
from allreduced.daemon.carrier import TCP, carried
from allreduced.daemon.credentials import FileCredentials
from allreduced.daemon.driver import Driver
from allreduced.daemon.engine.engine import Engine
from allreduced.daemon.engine.limits import Limits as EngineLimits
from allreduced.daemon.kernel_port import Kernels, native_kernels, reduction_threads
from allreduced.daemon.local_limits import LocalLimits
from allreduced.daemon.local_server import LocalServer
from allreduced.daemon.membership.events import Event as MembershipEvent
from allreduced.daemon.membership.events import FrameArrived
from allreduced.daemon.membership.membership import Membership
from allreduced.daemon.memory_share import default_total
from allreduced.daemon.metrics.assembly import metered, monitoring
from allreduced.daemon.peers import Peers
from allreduced.daemon.process_state import process_state
from allreduced.daemon.rdma_use import choose
from allreduced.daemon.reach import ReachService
from allreduced.daemon.report import AgentFacts, make_report
from allreduced.daemon.settings import Limits, Settings
from allreduced.daemon.start_check import Read
from allreduced.daemon.status import StatusService, status_wait
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.protocol.peer import Announce
from allreduced.protocol.status import AgentReport
from allreduced.transports.base import LinkOptions
from allreduced.transports.registry import transport

if TYPE_CHECKING:
    from allreduced.daemon.metrics.monitoring import Monitoring

MOST_OPERATIONS = 256
"""Operations of which a status report tells: to look at more would hold up those that run."""


@dataclass(slots=True)
class Listed:
    """The names of the nodes that may be peers under TLS; None where there is no list of them."""

    nodes: frozenset[str] | None = None

    def use_settings(self, settings: Settings) -> None:
        """Take the list of the settings."""
        static = settings.peers.static
        self.nodes = frozenset(peer.node for peer in static) if static else None


@dataclass(frozen=True, slots=True)
class Parts:
    """What an agent consists of. ``agent`` starts and ends them. ``threads``: the number of reduction threads.

    ``monitoring``: None where the settings ask for no metrics.
    """

    node: str
    incarnation: int
    secret: bytes
    credentials: FileCredentials | None
    listed: Listed
    threads: int
    arenas: ArenaTable
    kernels: Kernels
    engine: Engine
    driver: Driver
    server: LocalServer
    peers: Peers
    status: StatusService
    monitoring: Monitoring | None


def assemble(node: str, settings: Settings, read: Read, *, tile_bytes: int = 0) -> Parts:
    """Make the parts of an agent. ``read``: what the check of the start has read.

    ``tile_bytes``: in place of the setting, for tests; 0 for the setting.

    :raises ConfigError: the settings cannot be met on this machine.
    :raises AgentUnavailable: the native kernels are missing.
    """
    # Grows with each start, so that others know which of two is the later one.
    incarnation = (time.time_ns() >> 16 << 16) | secrets.randbits(16)
    secret, certificates = read.secret, read.certificates
    credentials = FileCredentials(certificates.files, node, loaded=certificates) if certificates is not None else None
    listed = Listed()
    listed.use_settings(settings)
    limits, timing, engine_settings = settings.limits, settings.timing, settings.engine
    total = limits.arena_bytes or default_total()
    carriage = choose(settings, total)
    arenas = ArenaTable(_arena_limits(limits, total))
    threads = reduction_threads(engine_settings)
    native = native_kernels(threads, engine_settings.cpus, engine_settings.nice)
    counted = metered(native) if settings.metrics.listen else None
    kernels: Kernels = counted or native
    engine = Engine(node, _engine_limits(settings, total))
    membership = Membership(
        node, incarnation, tile_bytes or engine_settings.tile_bytes, lambda: secrets.randbits(63), timing
    )
    driver = Driver(engine, membership, kernels, arenas)
    server = LocalServer(
        driver,
        arenas,
        node=node,
        incarnation=incarnation,
        limits=_local_limits(limits),
        default_deadline=settings.failure.deadline,
        failure_timeout=timing.failure_timeout,
        access=access_from(settings.access, os.geteuid()),
        job_secrets=settings.access.job_secrets == "required",
    )
    peers = Peers(
        node,
        incarnation,
        _ForLinks(driver, server),
        LinkOptions(
            authenticator=SecretAuthenticator(
                node, incarnation, secret, encrypted=credentials is not None, listed=lambda: listed.nodes
            ),
            credentials=credentials,
            flows=settings.peers.flows,
            max_frame=engine_settings.tile_bytes,
            connect_timeout=timing.connect,
            handshake_timeout=timing.connect,
            max_pending_handshakes=limits.pending_handshakes,
            rdma=settings.rdma_options,
        ),
        carried(transport, carriage),
        timing=timing,
        most=limits.peers,
        rdma_expected=carriage.scheme != TCP,
    )
    started = time.monotonic()

    def report(asker: int) -> AgentReport:
        """Return what the user ``asker`` is told about this agent."""
        now = driver.now()
        return make_report(
            asker,
            AgentFacts(
                node,
                incarnation,
                os.getpid(),
                os.geteuid(),
                now - started,
                server.served,
                release(),
                peers.advertised,
            ),
            engine.snapshot(now, MOST_OPERATIONS),
            membership.snapshot(),
            peers.view(),
            lambda client: process_state(server.process_of(client)).value,
            now,
        )

    reach = ReachService(peers)
    status = StatusService(
        report,
        peers,
        wait=status_wait(timing.failure_timeout),
        probe=lambda bandwidth: reach.examine(bandwidth=bandwidth),
    )
    server.use_status(status)
    peers.on_status = status.frame_arrived
    peers.on_load = reach.frame_arrived
    watched = None
    if counted is not None:
        watched = monitoring(
            node,
            settings,
            engine=engine,
            driver=driver,
            server=server,
            arenas=arenas,
            kernels=counted,
            peers=peers,
        )
    return Parts(
        node=node,
        incarnation=incarnation,
        secret=secret,
        credentials=credentials,
        listed=listed,
        threads=threads,
        arenas=arenas,
        kernels=kernels,
        engine=engine,
        driver=driver,
        server=server,
        peers=peers,
        status=status,
        monitoring=watched,
    )


def use_settings(parts: Parts, settings: Settings) -> None:
    """Put into force what can change at run time (``reload_plan``); the rest of ``settings`` must be as it was."""
    limits = settings.limits
    total = parts.arenas.limits.total
    logs.set_level(settings.agent.log_level)
    parts.listed.use_settings(settings)
    parts.server.use_limits(_local_limits(limits))
    parts.peers.use_limit(limits.peers)
    parts.arenas.limits = _arena_limits(limits, total)
    parts.engine.use_limits(_engine_limits(settings, total))


def _engine_limits(settings: Settings, total: int) -> EngineLimits:
    limits, timing = settings.limits, settings.timing
    return EngineLimits(
        inline_bytes=limits.inline,
        arena_bytes=total,
        user_bytes=limits.arena_bytes_per_user,
        scratch_bytes=max(total // 4, 1),
        window_tiles=settings.engine.window_tiles,
        operations=limits.operations,
        names=limits.names,
        lease_bytes=limits.lease_bytes,
        leases=limits.leases,
        failure_timeout=timing.failure_timeout,
        confirm_seconds=timing.confirm,
    )


def _local_limits(limits: Limits) -> LocalLimits:
    return LocalLimits(
        clients=limits.clients,
        clients_per_user=limits.clients_per_user,
        requests=limits.requests,
        requests_per_user=limits.requests_per_user,
        groups=limits.groups,
        groups_per_user=limits.groups_per_user,
        streams=limits.streams,
        inline=limits.inline,
        inline_bytes=limits.inline_bytes,
        outgoing_bytes=limits.outgoing_bytes,
        outgoing_messages=limits.outgoing_messages,
        hello_timeout=limits.hello_timeout,
    )


def _arena_limits(limits: Limits, total: int) -> ArenaLimits:
    inputs = ArenaLimits.from_total(total).inputs
    per_client = min(limits.arena_bytes_per_client or inputs, inputs)
    return ArenaLimits(total, inputs, per_client, limits.arenas_per_client, limits.arena_bytes_per_user)


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
