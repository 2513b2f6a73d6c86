"""Makes Prometheus' metrics of what is known of an agent. A pure function of the facts, in the catalogue's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric

from allreduced.daemon.engine.reading import GroupReading, Reading
from allreduced.daemon.histogram import Histogram
from allreduced.daemon.metrics import catalogue
from allreduced.daemon.metrics.calls import CallMeter
from allreduced.daemon.metrics.catalogue import Described
from allreduced.daemon.metrics.facts import Facts, LogCount
from allreduced.daemon.metrics.kernels import MeteredKernels
from allreduced.daemon.traffic import PeerTraffic
from allreduced.transports.base import LinkStats

_Labels = TypeVar("_Labels", bound=tuple[str, ...])


def families(facts: Facts) -> Iterator[Metric]:
    """Yield every metric, one at a time, so that whoever writes them can pause in between."""
    yield _gauge(catalogue.INFO, {(facts.version, facts.node, facts.loop): 1})
    yield _gauge(catalogue.READY, {(): int(facts.ready)})
    yield _histogram(catalogue.LOOP_LAG, {(): facts.lag})
    yield _gauge(catalogue.CLIENTS, {(): facts.clients})
    yield _gauge(catalogue.CLIENTS_LIMIT, {(): facts.clients_limit})
    yield from _calls(facts.calls)
    yield _gauge(catalogue.IN_FLIGHT, {(): facts.in_flight})
    yield from _groups(facts.engine)
    yield _gauge(catalogue.ARENA, {(use,): nbytes for use, nbytes in facts.memory.used.items()})
    yield _gauge(catalogue.ARENA_LIMIT, {(use,): nbytes for use, nbytes in facts.memory.limits.items()})
    yield _gauge(catalogue.ARENA_RESERVED, {(): facts.engine.reserved_bytes})
    yield _gauge(catalogue.LEASES, {(): facts.engine.lease_bytes})
    yield from _kernels(facts.kernels)
    yield from _peers(facts)
    yield from _links(facts.links)
    yield _counter(catalogue.REFUSALS, {(plane, kind): count for (plane, kind), count in facts.refusals.items()})
    yield from _log(facts.log)
    yield _counter(catalogue.LOG_LOST, {(): facts.log_lost})


def _calls(calls: CallMeter) -> Iterator[Metric]:
    kinds = calls.kinds
    ended = {(kind, "ok"): count.delivered for kind, count in kinds.items()}
    ended |= {(kind, "failed"): count.failed for kind, count in kinds.items()}
    yield _counter(catalogue.OPERATIONS, ended)
    yield _counter(catalogue.FAILURES, calls.errors)
    yield _counter(catalogue.OPERATION_BYTES, {(kind,): count.nbytes for kind, count in kinds.items()})
    durations = {
        (kind, size): histogram for kind, count in kinds.items() for size, histogram in count.durations().items()
    }
    yield _histogram(catalogue.DURATION, durations)


def _groups(engine: Reading) -> Iterator[Metric]:
    # Two agents' groups may share a key while one is forgotten and the next one forms: the later one counts.
    groups = {_key(group): group for group in engine.groups}
    yield _gauge(catalogue.GROUPS, {(): engine.group_count})
    yield _gauge(catalogue.GROUPS_LEFT_OUT, {(): engine.group_count - len(engine.groups)})
    yield _gauge(catalogue.GENERATION, {key: group.generation for key, group in groups.items()})
    yield _gauge(catalogue.GROUP_RANKS, {key: group.size for key, group in groups.items()})
    yield _gauge(catalogue.GROUP_IN_FLIGHT, {key: group.in_flight for key, group in groups.items()})
    yield _gauge(catalogue.GROUP_OLDEST, {key: group.oldest for key, group in groups.items()})
    yield _histogram(catalogue.SKEW, {key: group.skew for key, group in groups.items()})
    lateness = SummaryMetricFamily(
        catalogue.LATENESS.name, catalogue.LATENESS.meaning, labels=catalogue.LATENESS.labels
    )
    for key, group in groups.items():
        for rank, calls, seconds in group.lateness:
            lateness.add_metric((*key, str(rank)), calls, seconds)
    yield lateness
    awaited = {
        (*key, str(rank)): group.oldest if rank in group.awaited else 0.0
        for key, group in groups.items()
        for rank, _, _ in group.lateness
    }
    yield _gauge(catalogue.AWAITED, awaited)


def _key(group: GroupReading) -> tuple[str, str, str]:
    return str(group.key.uid), group.key.job, group.key.name


def _kernels(kernels: MeteredKernels) -> Iterator[Metric]:
    seconds = {("threads",): kernels.threads_seconds(), ("loop",): kernels.loop_seconds}
    yield _counter(catalogue.KERNEL_SECONDS, seconds)
    yield _counter(catalogue.KERNEL_JOBS, {("threads",): kernels.pool_jobs, ("loop",): kernels.loop_jobs})
    yield _counter(catalogue.KERNEL_BYTES, {("threads",): kernels.pool_bytes, ("loop",): kernels.loop_bytes})


def _peers(facts: Facts) -> Iterator[Metric]:
    up = {(peer.node,): 1 for peer in facts.peers}
    yield _gauge(catalogue.PEER_UP, {(node,): 0 for node in facts.lost} | up)
    yield _gauge(catalogue.PEERS_UNREACHED, {(): facts.unreached})
    yield _gauge(catalogue.PEER_SILENCE, {(peer.node,): peer.silence for peer in facts.peers})
    # From 0 on: of a counter that begins at 1 Prometheus sees no increase, so that no alert would tell the first loss.
    traffic = {peer.node: PeerTraffic() for peer in facts.peers} | dict(facts.traffic)
    yield _counter(catalogue.PEER_LOSSES, {(node,): peer.losses for node, peer in traffic.items()})
    yield _counter(catalogue.LINK_RESETS, {(node,): peer.resets for node, peer in traffic.items()})


def _links(links: Mapping[tuple[str, str], LinkStats]) -> Iterator[Metric]:
    for described, sent, received in (
        (catalogue.LINK_BYTES, "bytes_sent", "bytes_received"),
        (catalogue.LINK_FRAMES, "frames_sent", "frames_received"),
        (catalogue.LINK_CONTROL, "control_sent", "control_received"),
    ):
        values = {(*key, "sent"): int(getattr(stats, sent)) for key, stats in links.items()}
        values |= {(*key, "received"): int(getattr(stats, received)) for key, stats in links.items()}
        yield _counter(described, values)
    yield _counter(catalogue.LINK_UNCLAIMED, {key: stats.frames_unclaimed for key, stats in links.items()})


def _log(log: tuple[LogCount, ...]) -> Iterator[Metric]:
    lines: Counter[tuple[str, ...]] = Counter()
    dropped: Counter[tuple[str, ...]] = Counter()
    for count in log:
        lines[count.level, count.event] += count.lines
        if count.dropped:
            dropped[count.event,] += count.dropped
    yield _counter(catalogue.LOG_LINES, lines)
    yield _counter(catalogue.LOG_DROPPED, dropped)


def _gauge(described: Described, values: Mapping[_Labels, float]) -> Metric:
    family = GaugeMetricFamily(described.name, described.meaning, labels=described.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _counter(described: Described, values: Mapping[_Labels, float]) -> Metric:
    family = CounterMetricFamily(described.name, described.meaning, labels=described.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _histogram(described: Described, values: Mapping[_Labels, Histogram]) -> Metric:
    family = HistogramMetricFamily(described.name, described.meaning, labels=described.labels)
    for labels, histogram in values.items():
        below = 0
        buckets = []
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), below))
        family.add_metric(labels, buckets, histogram.total)
    return family
