"""The metrics and the health of one agent, over HTTP."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from allreduced.core.addresses import Address
from allreduced.core.refusals import POSSIBLE, REFUSED
from allreduced.daemon.arena import ArenaKind
from allreduced.daemon.arena_table import ArenaTable
from allreduced.daemon.engine.reading import Reading
from allreduced.daemon.metrics.address import cannot_listen, listen_address
from allreduced.daemon.metrics.calls import CallMeter
from allreduced.daemon.metrics.exposition import CONTENT_TYPE, Exposition
from allreduced.daemon.metrics.facts import Facts, LogCount, Memory
from allreduced.daemon.metrics.health import Phase, not_ready, unhealthy
from allreduced.daemon.metrics.http import Answer, HttpServer, plain
from allreduced.daemon.metrics.kernels import MeteredKernels
from allreduced.daemon.metrics.loop_lag import LoopLag
from allreduced.daemon.peers import Peers

logger = logging.getLogger("allreduced.metrics")


class Readable(Protocol):
    """The engine, as far as it is needed here."""

    def reading(self, most: int, now: float) -> Reading:
        """Return the numbers for metrics."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the numbers come from; sizes in bytes.

    ``clients``, ``in_flight``: return how many there are. ``log``: returns how many lines were written;
    ``log_lost``: how many nobody took.
    """

    version: str
    node: str
    calls: CallMeter
    kernels: MeteredKernels
    engine: Readable
    arenas: ArenaTable
    peers: Peers
    now: Callable[[], float]
    clients: Callable[[], int]
    clients_limit: Callable[[], int]
    in_flight: Callable[[], int]
    log: Callable[[], tuple[LogCount, ...]]
    log_lost: Callable[[], int]


class Monitoring:
    """Serves ``/metrics``, ``/healthz`` and ``/readyz``. On one loop: :meth:`open`, :meth:`serving`, … :meth:`close`.

    ``groups``: how many groups have series of their own. ``names``: see ``HttpServer``.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        listen: str,
        groups: int,
        names: tuple[str, ...] = (),
        failure_timeout: float,
    ) -> None:
        self._sources = sources
        self._listen = listen_address(listen)
        self._groups = groups
        self._failure_timeout = failure_timeout
        self._lag = LoopLag()
        self._loop_name = ""
        self._phase = Phase.STARTING
        self._exposition = Exposition(self.facts)
        self._server = HttpServer(
            {"/metrics": self._metrics, "/healthz": self._health, "/readyz": self._ready},
            (*names, self._listen.host, sources.node, socket.gethostname()),
        )

    async def open(self) -> Address:
        """Listen, and return where.

        :raises ConfigError: the address cannot be had; ``path`` names the setting.
        """
        address = self._listen
        try:
            host, port = await self._server.listen(address.host, address.port)
        except OSError as error:
            raise cannot_listen(address, error) from error
        self._loop_name = type(asyncio.get_running_loop()).__module__.partition(".")[0]
        self._lag.start()
        got = Address("http", host, port)
        logger.info("event=metrics_ready address=%s", got)
        return got

    def serving(self) -> None:
        """Take note that the agent has started."""
        self._phase = Phase.SERVING

    def draining(self) -> None:
        """Take note that the agent stops: it is not ready any more."""
        self._phase = Phase.DRAINING

    async def close(self) -> None:
        """Serve nothing any more. Idempotent."""
        self._lag.close()
        await self._server.close()
        await self._exposition.close()

    def facts(self) -> Facts:
        """Return what is known now."""
        sources = self._sources
        peers = sources.peers
        arenas = sources.arenas
        by_kind = arenas.bytes_by_kind
        return Facts(
            version=sources.version,
            node=sources.node,
            loop=self._loop_name,
            ready=not self._why_not_ready(),
            lag=self._lag.seconds.copy(),
            clients=sources.clients(),
            clients_limit=sources.clients_limit(),
            in_flight=sources.in_flight(),
            calls=sources.calls,
            kernels=sources.kernels,
            engine=sources.engine.reading(self._groups, sources.now()),
            memory=Memory(
                {
                    "inputs": by_kind[ArenaKind.INPUT],
                    "results": by_kind[ArenaKind.RESULT],
                    "private": by_kind[ArenaKind.PRIVATE],
                },
                {"total": arenas.limits.total, "inputs": arenas.limits.inputs},
            ),
            peers=peers.view(),
            lost=peers.lost(),
            unreached=len(peers.never_reached()),
            traffic=peers.traffic.peers,
            links=peers.traffic.read(peers.links()),
            refusals={pair: REFUSED[pair] for pair in POSSIBLE},
            log=sources.log(),
            log_lost=sources.log_lost(),
        )

    def _why_not_ready(self) -> tuple[str, ...]:
        peers = self._sources.peers
        return not_ready(self._phase, peers.never_reached(), len(peers.view()), peers.lost())

    async def _metrics(self) -> Answer:
        return Answer(HTTPStatus.OK, await self._exposition.text(), CONTENT_TYPE)

    async def _health(self) -> Answer:
        why = unhealthy(self._lag.since(), self._failure_timeout)
        return plain(HTTPStatus.SERVICE_UNAVAILABLE, why) if why else plain(HTTPStatus.OK, "ok")

    async def _ready(self) -> Answer:
        why = self._why_not_ready()
        return plain(HTTPStatus.SERVICE_UNAVAILABLE, "\n".join(why)) if why else plain(HTTPStatus.OK, "ready")
