"""Metrics out of facts: names, labels, values, and text that Prometheus' own parser reads."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.driver_rig import FakeKernels, FakeLink

from allreduced.core import refusals
from allreduced.core.dtypes import DType
from allreduced.core.errors import DeadlineExceeded, PeerLost
from allreduced.core.identity import GroupKey
from allreduced.daemon.engine.events import Submitted
from allreduced.daemon.engine.lateness import Lateness
from allreduced.daemon.engine.reading import GroupReading, Reading
from allreduced.daemon.histogram import Histogram
from allreduced.daemon.metrics.calls import CallMeter
from allreduced.daemon.metrics.catalogue import CATALOGUE, Described, Kind
from allreduced.daemon.metrics.exposition import SAMPLES_AT_ONCE, Exposition
from allreduced.daemon.metrics.facts import Facts, LogCount, Memory
from allreduced.daemon.metrics.health import Phase, not_ready, unhealthy
from allreduced.daemon.metrics.kernels import MeteredKernels, ThreadClock
from allreduced.daemon.metrics.loop_lag import LoopLag
from allreduced.daemon.ports import ReachablePeer
from allreduced.daemon.traffic import MAX_PEERS, PeerTraffic, Traffic
from allreduced.protocol.peer import Fingerprint
from allreduced.transports.base import LinkStats

Texts = dict[str, dict[tuple[str, ...], float]]


def call(kind: str = "all_reduce", count: int = 1, dtype: DType = DType.FLOAT32) -> Submitted:
    return Submitted(1, 1, 1, 0, "", Fingerprint(kind, int(dtype), 1, "", count, -1, ""), None, 1e9, 0)


def facts(**changes: object) -> Facts:
    kernels = MeteredKernels(FakeKernels(), lambda: 1.5)
    kernels.close()
    calls = CallMeter()
    calls.delivered(call(), 0.002)
    calls.failed(call("barrier", 0), DeadlineExceeded("late", missing=(1,)))
    lateness = Lateness(2)
    lateness.called(0, 0.0, last=False)
    lateness.called(1, 0.3, last=True)
    group = GroupReading(
        GroupKey(7, 'job "1"\n\\', "world"), 3, 4, 1, 2.5, (3,), ((1, 1, 0.0), (3, 1, 0.3)), lateness.skew
    )
    given = Facts(
        version="1.0",
        node="n0",
        loop="asyncio",
        ready=True,
        lag=Histogram((0.1, 1.0)),
        clients=2,
        clients_limit=9,
        in_flight=1,
        calls=calls,
        kernels=kernels,
        engine=Reading((group,), 2, 100, 50),
        memory=Memory({"inputs": 10, "results": 20, "private": 30}, {"total": 1000, "inputs": 750}),
        peers=(ReachablePeer("n1", 1, "", "tcp://h:1", 0.25),),
        lost=("n2",),
        unreached=1,
        traffic={"n2": PeerTraffic(resets=2, losses=1)},
        links={("n1", "tcp"): LinkStats(1, 2, 3, 4, 5, 6, 7)},
        refusals={
            (refusals.Plane.CLIENTS, refusals.Kind.ACCESS): 30,
            (refusals.Plane.PEERS, refusals.Kind.TLS): 2,
            (refusals.Plane.PEERS, refusals.Kind.LIMIT): 0,
        },
        log=(LogCount("warning", "client_dropped", 30, 10), LogCount("info", "ready", 1, 0)),
        log_lost=3,
    )
    return replace(given, **changes)  # type: ignore[arg-type] # tests change what they look at


async def text(known: Facts) -> str:
    exposition = Exposition(lambda: known)
    return (await exposition.text()).decode()


async def samples(known: Facts) -> Texts:
    found: Texts = {}
    for family in text_string_to_metric_families(await text(known)):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {})
            found[sample.name][labels] = sample.value
    return found


async def test_every_value_is_where_it_belongs() -> None:
    found = await samples(facts())
    group = ("world", 'job "1"\n\\', "7")
    assert found["allreduced_build_info"] == {("asyncio", "n0", "1.0"): 1}
    assert found["allreduced_operations_total"][("all_reduce", "ok")] == 1
    assert found["allreduced_operations_total"][("barrier", "failed")] == 1
    assert found["allreduced_operation_failures_total"] == {("deadline_exceeded", "barrier"): 1}
    assert found["allreduced_operation_bytes_total"][("all_reduce",)] == 4
    buckets = found["allreduced_operation_duration_seconds_bucket"]
    assert buckets[("all_reduce", "0.001", "4KiB")] == 0
    assert buckets[("all_reduce", "0.0025", "4KiB")] == buckets[("all_reduce", "+Inf", "4KiB")] == 1
    assert found["allreduced_operation_duration_seconds_sum"] == {("all_reduce", "4KiB"): 0.002}
    assert found["allreduced_groups"] == {(): 2}
    assert found["allreduced_groups_left_out"] == {(): 1}
    assert found["allreduced_group_generation"] == {group: 3}
    assert found["allreduced_group_ranks"] == {group: 4}
    assert found["allreduced_group_operations_in_flight"] == {group: 1}
    assert found["allreduced_group_oldest_operation_seconds"] == {group: 2.5}
    late = {(*group[:2], rank, group[2]): seconds for rank, seconds in (("1", 0.0), ("3", 0.3))}
    assert found["allreduced_rank_lateness_seconds_sum"] == late
    awaited = {(*group[:2], rank, group[2]): seconds for rank, seconds in (("1", 0.0), ("3", 2.5))}
    assert found["allreduced_rank_awaited_seconds"] == awaited
    assert found["allreduced_arrival_skew_seconds_count"] == {group: 1}
    assert found["allreduced_arena_bytes"] == {("inputs",): 10, ("results",): 20, ("private",): 30}
    assert found["allreduced_arena_limit_bytes"] == {("total",): 1000, ("inputs",): 750}
    assert found["allreduced_arena_reserved_bytes"] == {(): 100}
    assert found["allreduced_lease_bytes"] == {(): 50}
    assert found["allreduced_kernel_seconds_total"] == {("threads",): 1.5, ("loop",): 0.0}
    assert found["allreduced_peer_up"] == {("n1",): 1, ("n2",): 0}
    assert found["allreduced_peers_never_reached"] == {(): 1}
    assert found["allreduced_peer_silence_seconds"] == {("n1",): 0.25}
    assert found["allreduced_peer_losses_total"] == {("n1",): 0, ("n2",): 1}
    assert found["allreduced_link_resets_total"] == {("n1",): 0, ("n2",): 2}
    assert found["allreduced_link_control_frames_total"] == {("sent", "n1", "tcp"): 1, ("received", "n1", "tcp"): 2}
    assert found["allreduced_link_frames_total"] == {("sent", "n1", "tcp"): 3, ("received", "n1", "tcp"): 4}
    assert found["allreduced_link_bytes_total"] == {("sent", "n1", "tcp"): 5, ("received", "n1", "tcp"): 6}
    assert found["allreduced_link_unclaimed_frames_total"] == {("n1", "tcp"): 7}
    assert found["allreduced_refusals_total"] == {
        ("access", "clients"): 30,
        ("tls", "peers"): 2,
        ("limit", "peers"): 0,
    }
    assert found["allreduced_log_lines_total"] == {("client_dropped", "warning"): 30, ("ready", "info"): 1}
    assert found["allreduced_log_lines_dropped_total"] == {("client_dropped",): 10}
    assert found["allreduced_log_lines_lost_total"] == {(): 3}


async def test_counters_of_a_linked_peer_are_not_zero_where_something_happened_to_it_before() -> None:
    found = await samples(facts(traffic={"n1": PeerTraffic(resets=2, losses=1)}))
    assert found["allreduced_peer_losses_total"] == {("n1",): 1}
    assert found["allreduced_link_resets_total"] == {("n1",): 2}


async def test_pieces_make_the_same_text_as_a_whole() -> None:
    many = {(f"n{number}",): PeerTraffic(resets=number) for number in range(3 * SAMPLES_AT_ONCE + 1)}
    written = await text(facts(traffic={node: peer for (node,), peer in many.items()}))
    assert written.count("# TYPE allreduced_link_resets_total counter\n") == 1
    found = await samples(facts(traffic={node: peer for (node,), peer in many.items()}))
    assert found["allreduced_link_resets_total"] == {node: peer.resets for node, peer in many.items()}


async def test_all_that_is_described_is_told_in_that_order_and_nothing_else() -> None:
    names = re.findall(r"^# TYPE (allreduced_\w+) (\w+)$", await text(facts()), flags=re.MULTILINE)
    assert names == [(described.name, described.kind.value) for described in CATALOGUE]
    assert len({name for name, _ in names}) == len(names)


@pytest.mark.parametrize("described", CATALOGUE, ids=lambda described: described.name)
def test_names_follow_the_conventions(described: Described) -> None:
    """What ``promtool check metrics`` looks at, and that units are base units at the end of the name."""
    metric = described
    assert re.fullmatch(r"allreduced(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert not re.search(r"_(bucket|count|sum|created|info_total|counter|gauge|histogram|summary)$", metric.name)
    assert not re.search(
        r"_(ms|us|ns|milliseconds|microseconds|minutes|hours|kb|mb|kib|mib|gib|kilobytes|megabytes|bits|percent)(_|$)",
        metric.name,
    )
    for unit in ("seconds", "bytes"):
        assert unit not in metric.name.split("_")[:-1] or metric.name.endswith(f"_{unit}_total")
    if metric.kind in (Kind.HISTOGRAM, Kind.SUMMARY):
        assert metric.name.endswith("_seconds")
    assert metric.meaning.strip().endswith(".")
    reserved = {"le", "quantile", "instance", "job", "node_name"}  # Prometheus sets these itself
    assert not reserved & set(metric.labels)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in metric.labels)


def test_sizes_have_their_classes_and_unknown_kinds_one_series() -> None:
    meter = CallMeter()
    for nbytes in (0, 1, 4096, 4097, 1 << 20, (1 << 20) + 1, 1 << 28, 1 << 50):
        meter.delivered(call(count=nbytes, dtype=DType.INT8), 0.1)
    assert {size: seconds.count for size, seconds in meter.kinds["all_reduce"].durations().items()} == {
        "4KiB": 3,
        "64KiB": 1,
        "1MiB": 1,
        "16MiB": 1,
        "256MiB": 1,
        "larger": 1,
    }
    for number in range(100):
        meter.failed(call(f"kind{number}"), PeerLost("gone"))
    assert meter.errors == {("unknown", "peer_lost"): 100}
    assert set(meter.kinds) == {"all_reduce", "all_reduce_many", "broadcast", "barrier", "unknown"}


def test_histograms_put_a_value_at_a_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    copied = histogram.copy()
    histogram.observe(9.0)
    assert (copied.counts, copied.total, copied.count) == ([2, 2, 1], 7.5, 5)


def test_kernels_are_counted_where_they_run() -> None:
    inner = FakeKernels()
    kernels = MeteredKernels(inner, lambda: 0.0)
    kernels.reduce(int(DType.FLOAT64), 1, 1, 10, [1, 2, 3], 4, partials=0, partial_target=False)
    kernels.submit(5, int(DType.INT8), 1, 1, 100, [1, 2], 4, 7, partials=0, partial_target=False, share=1001)
    assert (kernels.loop_jobs, kernels.loop_bytes, kernels.pool_jobs, kernels.pool_bytes) == (1, 240, 1, 200)
    assert kernels.loop_seconds > 0
    assert inner.queued == [(5, 7, 1001)]
    assert inner.at_once == 1
    kernels.close()


def test_the_time_of_threads_is_read_from_the_kernel(tmp_path: Path) -> None:
    for number, (name, nanoseconds) in enumerate(
        (("reduce-0", 1_500_000_000), ("reduce-1", 500_000_000), ("python", 9))
    ):
        task = tmp_path / str(number)
        task.mkdir()
        (task / "comm").write_text(f"{name}\n")
        (task / "schedstat").write_text(f"{nanoseconds} 1 2\n")
    clock = ThreadClock(tmp_path)
    assert clock.seconds() == 2.0
    (tmp_path / "0" / "schedstat").unlink()
    assert clock.seconds() == 0.5


def test_traffic_of_links_that_are_over_is_kept_within_bounds() -> None:
    traffic = Traffic()
    live = FakeLink("n1")
    live.remote_address = "tcp://h:1"
    live.stats.bytes_sent = 10
    over = FakeLink("n1")
    over.remote_address = "tcp://h:1"
    over.stats.bytes_sent = 5
    other = FakeLink("n1")
    other.remote_address, other.data_path = "tcp://h:1", "rdma rxe0 port 1"
    other.stats.bytes_sent = 3
    traffic.ended(over, orderly=False)
    traffic.ended(other, orderly=True)
    assert {key: stats.bytes_sent for key, stats in traffic.read([live]).items()} == {
        ("n1", "tcp"): 15,
        ("n1", "rdma"): 3,
    }
    assert {key: stats.bytes_sent for key, stats in traffic.read([live]).items()}[("n1", "tcp")] == 15
    assert traffic.peers["n1"].resets == 1
    for number in range(MAX_PEERS):
        traffic.lost(f"m{number}")
    assert len(traffic.peers) == MAX_PEERS
    assert "n1" not in traffic.peers
    assert traffic.read([]) == {}


async def test_the_lag_of_the_loop_is_looked_at() -> None:
    lag = LoopLag()
    lag.start()
    async with asyncio.timeout(20):
        while lag.seconds.count < 2:  # noqa: ASYNC110 # a timer fills it
            await asyncio.sleep(0.05)
    lag.close()
    assert lag.seconds.total >= 0


def test_health_and_readiness() -> None:
    assert unhealthy(0.1, 5.0) == ""
    assert unhealthy(1.9, 0.5) == ""
    assert unhealthy(2.1, 0.5) == "the event loop was held up for 2.1 s"
    assert unhealthy(5.5, 5.0) == "the event loop was held up for 5.5 s"
    assert not_ready(Phase.STARTING, (), 0, ()) == ("the agent is starting",)
    assert not_ready(Phase.DRAINING, (), 3, ()) == ("the agent is stopping",)
    assert not_ready(Phase.SERVING, (), 0, ()) == ()
    assert not_ready(Phase.SERVING, (), 1, ("b",)) == ()
    assert not_ready(Phase.SERVING, (), 0, ("b", "c")) == ("no peer is reached any more, b, c neither",)
    assert not_ready(Phase.SERVING, ("tcp://h:1",), 1, ()) == ("peer never reached: tcp://h:1",)
