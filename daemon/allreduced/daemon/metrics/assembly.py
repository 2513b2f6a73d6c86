"""Puts the metrics of an agent together, where its settings ask for them. The libraries are imported only then."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from allreduced.core.errors import ConfigError
from allreduced.core.release import release
from allreduced.daemon import logs
from allreduced.daemon.arena_table import ArenaTable
from allreduced.daemon.driver import Driver
from allreduced.daemon.engine.engine import Engine
from allreduced.daemon.kernel_port import Kernels
from allreduced.daemon.local_server import LocalServer
from allreduced.daemon.metrics.address import LISTEN
from allreduced.daemon.metrics.calls import CallMeter
from allreduced.daemon.metrics.kernels import MeteredKernels, ThreadClock
from allreduced.daemon.peers import Peers
from allreduced.daemon.settings import Settings

if TYPE_CHECKING:
    from allreduced.daemon.metrics.facts import LogCount
    from allreduced.daemon.metrics.monitoring import Monitoring


def metered(kernels: Kernels) -> MeteredKernels:
    """Return the kernels of this process, with counts."""
    return MeteredKernels(kernels, ThreadClock().seconds)


def check_libraries() -> None:
    """Check that what serves metrics is installed.

    :raises ConfigError: a library is missing.
    """
    try:
        import allreduced.daemon.metrics.monitoring  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"metrics need the module {error.name}", path=LISTEN, hint="pip install 'allreduced[agent]'"
        ) from error


def monitoring(
    node: str,
    settings: Settings,
    *,
    engine: Engine,
    driver: Driver,
    server: LocalServer,
    arenas: ArenaTable,
    kernels: MeteredKernels,
    peers: Peers,
) -> Monitoring:
    """Return what serves the metrics of these parts, and have the driver count for it. It does not listen yet.

    :raises ConfigError: a library is missing, or the address is malformed.
    """
    check_libraries()
    from allreduced.daemon.metrics.monitoring import Monitoring, Sources

    calls = CallMeter()
    driver.meter = calls
    return Monitoring(
        Sources(
            version=release(),
            node=node,
            calls=calls,
            kernels=kernels,
            engine=engine,
            arenas=arenas,
            peers=peers,
            now=driver.now,
            clients=lambda: server.clients,
            clients_limit=lambda: server.limits.clients,
            in_flight=lambda: driver.in_flight,
            log=_log_counts,
            log_lost=logs.lost_lines,
        ),
        listen=settings.metrics.listen,
        groups=settings.metrics.groups,
        names=settings.metrics.hosts,
        failure_timeout=settings.failure.failure_timeout,
    )


def _log_counts() -> tuple[LogCount, ...]:
    from allreduced.daemon.metrics.facts import LogCount

    return tuple(
        LogCount(logging.getLevelName(level).lower(), event, lines, dropped)
        for level, event, lines, dropped in logs.line_counts()
    )
