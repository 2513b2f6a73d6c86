"""What is known of an agent at one moment, as plain data, out of which metrics are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from allreduced.core.refusals import Kind, Plane
from allreduced.daemon.engine.reading import Reading
from allreduced.daemon.histogram import Histogram
from allreduced.daemon.metrics.calls import CallMeter
from allreduced.daemon.metrics.kernels import MeteredKernels
from allreduced.daemon.ports import ReachablePeer
from allreduced.daemon.traffic import PeerTraffic
from allreduced.transports.base import LinkStats


@dataclass(frozen=True, slots=True)
class Memory:
    """Of the arenas, in bytes; by use, as in the metrics."""

    used: Mapping[str, int]
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LogCount:
    """Lines of one level and event: ``lines`` in all, ``dropped`` of them were not written."""

    level: str
    event: str
    lines: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Facts:
    """One agent. ``unreached``: listed peers to which there was never a link; ``lost``: peers without a link now.

    ``links``: by node and transport, links that are over included. ``log_lost``: lines that nobody took.
    """

    version: str
    node: str
    loop: str
    ready: bool
    lag: Histogram
    clients: int
    clients_limit: int
    in_flight: int
    calls: CallMeter
    kernels: MeteredKernels
    engine: Reading
    memory: Memory
    peers: tuple[ReachablePeer, ...]
    lost: tuple[str, ...]
    unreached: int
    traffic: Mapping[str, PeerTraffic]
    links: Mapping[tuple[str, str], LinkStats]
    refusals: Mapping[tuple[Plane, Kind], int]
    log: tuple[LogCount, ...]
    log_lost: int
