"""The metrics and the health of real agents, after operations whose numbers are known."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import math
import os
import signal
import socket
from collections.abc import Mapping

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.contract.conftest import Recorder
from tests.integration.agents import NotStarted, StartAgent
from tests.integration.test_agent import BOUND, LOOPBACK, group, join
from tests.support.other_user import as_user

from allreduced.client import connect
from allreduced.core.errors import AllReducedError, AuthenticationError, ConfigError, MismatchError
from allreduced.daemon.metrics.catalogue import CATALOGUE, sample_names
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports.base import LinkOptions
from allreduced.transports.tcp import TcpTransport

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    """Return status and body of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=BOUND)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def scrape(port: int) -> Samples:
    """Return all samples; what is told twice, or is not described, is an error."""
    status, body = ask(port, "/metrics")
    assert status == 200
    described = {described.name: described for described in CATALOGUE}
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(body.decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if not name.startswith("process_"):
            assert family.type == described[name].kind.value
            assert family.documentation == described[name].meaning
        for sample in family.samples:
            if name in described:
                assert sample.name in sample_names(described[name])
                assert set(sample.labels) - {"le"} == set(described[name].labels)
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def refusals(samples: Samples, plane: str) -> dict[str, int]:
    """Return how many were refused on a plane, by kind; those of which there was none are left out."""
    counts = {
        dict(labels)["kind"]: int(count)
        for (name, labels), count in samples.items()
        if name == "allreduced_refusals_total" and dict(labels)["plane"] == plane
    }
    return {kind: count for kind, count in counts.items() if count}


def total(samples: Samples, name: str, **labels: str) -> float:
    """Return the sum over all labels that are not given."""
    return sum(
        number for (known, has), number in samples.items() if known == name and labels.items() <= dict(has).items()
    )


async def test_known_operations_make_known_numbers(start_agent: StartAgent, free_port: int) -> None:
    first = start_agent("a", *LOOPBACK, ALLREDUCED_METRICS_LISTEN=str(free_port), ALLREDUCED_AGENT_LOG_LEVEL="info")
    second = start_agent("b", *LOOPBACK, "--join", first.listen.removeprefix("tcp://"))
    async with asyncio.timeout(BOUND):
        async with group([first, second], 4, job="j") as ranks:
            for count, calls in ((1, 3), (1 << 18, 2), (300_000, 1)):
                for _ in range(calls):
                    inputs = [np.ones(count, "float32") for _ in ranks]
                    await asyncio.gather(*(rank.all_reduce(x) for rank, x in zip(ranks, inputs, strict=True)))
            await asyncio.gather(*(rank.barrier() for rank in ranks))
            shapes = (3, 4, 4, 4)
            failed = await asyncio.gather(
                *(rank.all_reduce(np.ones(n, "int64")) for rank, n in zip(ranks, shapes, strict=True)),
                return_exceptions=True,
            )
            assert [type(error) for error in failed] == [MismatchError] * 4
            samples = await asyncio.to_thread(scrape, free_port)
            by_group = {"uid": str(os.getuid()), "job_id": "j", "group": "world"}
            assert value(samples, "allreduced_operations_total", kind="all_reduce", outcome="ok") == 12
            assert value(samples, "allreduced_operations_total", kind="barrier", outcome="ok") == 2
            assert value(samples, "allreduced_operations_total", kind="all_reduce", outcome="failed") == 2
            assert value(samples, "allreduced_operation_failures_total", kind="all_reduce", error="mismatch") == 2
            nbytes = 2 * 4 * (3 + 2 * (1 << 18) + 300_000)
            assert value(samples, "allreduced_operation_bytes_total", kind="all_reduce") == nbytes
            for size, calls in (("4KiB", 6), ("1MiB", 4), ("16MiB", 2)):
                assert (
                    value(samples, "allreduced_operation_duration_seconds_count", kind="all_reduce", size=size) == calls
                )
            assert total(samples, "allreduced_operation_duration_seconds_count") == 14
            assert value(samples, "allreduced_operations_in_flight") == 0
            assert value(samples, "allreduced_clients") == 2
            assert value(samples, "allreduced_groups") == 1
            assert value(samples, "allreduced_group_generation", **by_group) == 1
            assert value(samples, "allreduced_group_ranks", **by_group) == 4
            assert value(samples, "allreduced_group_oldest_operation_seconds", **by_group) == 0
            for rank in "02":
                assert value(samples, "allreduced_rank_lateness_seconds_count", **by_group, rank=rank) == 8
                assert value(samples, "allreduced_rank_awaited_seconds", **by_group, rank=rank) == 0
            assert value(samples, "allreduced_arrival_skew_seconds_count", **by_group) == 8
            # Both nodes exchange half of each tensor in both directions, twice: inputs, then results.
            payload = 4 * (2 * (1 << 18) + 300_000)
            for direction in ("sent", "received"):
                sent = value(samples, "allreduced_link_bytes_total", peer="b", transport="tcp", direction=direction)
                assert 0 <= sent - payload < 100  # and what the single elements took
            assert value(samples, "allreduced_peer_up", peer="b") == 1
            assert value(samples, "allreduced_arena_bytes", use="inputs") > 0
            assert value(samples, "allreduced_arena_limit_bytes", use="total") > 0
            assert total(samples, "allreduced_kernel_jobs_total") > 0
            assert total(samples, "allreduced_kernel_bytes_total") >= nbytes / 2
            assert total(samples, "allreduced_kernel_seconds_total") > 0
            assert value(samples, "allreduced_log_lines_total", level="info", event="operation_failed") == 1
            assert refusals(samples, "peers") == refusals(samples, "clients") == {}
            assert value(samples, "allreduced_ready") == 1
            assert total(samples, "allreduced_build_info", node="a", loop="asyncio") == 1
            assert value(samples, "process_resident_memory_bytes") > 0
        samples = await until(free_port, "allreduced_groups", 0)
        assert not [name for name, labels in samples if "job_id" in dict(labels)], "a forgotten group has no series"
    assert first.stop() == 0
    line = f"event=operation_failed uid={os.getuid()} job=j group=world name='' generation=1 kind=all_reduce rank="
    assert first.logged().count(line) == 1
    assert " code=mismatch error=" in first.logged()


async def test_a_late_rank_is_seen_while_it_is_awaited_and_afterwards(start_agent: StartAgent, free_port: int) -> None:
    agent = start_agent("a", ALLREDUCED_METRICS_LISTEN=str(free_port))
    labels = {"uid": str(os.getuid()), "job_id": "job", "group": "world"}
    async with asyncio.timeout(BOUND), group([agent], 2) as ranks:
        early = asyncio.ensure_future(ranks[0].all_reduce(np.ones(4)))
        samples = await until(free_port, "allreduced_group_operations_in_flight", 1, **labels)
        while value(samples, "allreduced_rank_awaited_seconds", **labels, rank="1") < 0.2:
            samples = await asyncio.to_thread(scrape, free_port)
        assert value(samples, "allreduced_rank_awaited_seconds", **labels, rank="0") == 0
        assert value(samples, "allreduced_group_oldest_operation_seconds", **labels) >= 0.2
        await ranks[1].all_reduce(np.ones(4))
        await early
        samples = await asyncio.to_thread(scrape, free_port)
        assert value(samples, "allreduced_rank_lateness_seconds_sum", **labels, rank="1") >= 0.2
        assert value(samples, "allreduced_rank_lateness_seconds_sum", **labels, rank="0") == 0
        assert value(samples, "allreduced_arrival_skew_seconds_bucket", **labels, le="0.1") == 0
        assert value(samples, "allreduced_rank_awaited_seconds", **labels, rank="1") == 0


async def test_only_so_many_groups_have_series(start_agent: StartAgent, free_port: int) -> None:
    agent = start_agent("a", ALLREDUCED_METRICS_LISTEN=str(free_port), ALLREDUCED_METRICS_GROUPS="2")
    async with asyncio.timeout(BOUND):
        ranks = [await join(agent, 0, 1, job=f"job{number}") for number in range(5)]
        samples = await asyncio.to_thread(scrape, free_port)
        jobs = {dict(labels)["job_id"] for _, labels in samples if "job_id" in dict(labels)}
        assert jobs == {"job0", "job1"}
        assert value(samples, "allreduced_groups_left_out") == 3
        for rank in ranks:
            await rank.close()


async def test_health_and_readiness_follow_the_peers(start_agent: StartAgent, free_port: int) -> None:
    peer = start_agent("b", *LOOPBACK)
    where = f"b={peer.listen}"
    agent = start_agent("a", *LOOPBACK, "--peer", where, ALLREDUCED_METRICS_LISTEN=str(free_port))
    async with asyncio.timeout(BOUND):
        await until_ready(free_port, 200, b"ready\n")
        assert await asyncio.to_thread(ask, free_port, "/healthz") == (200, b"ok\n")
        peer.kill()
        _, body = await until_ready(free_port, 503)
        assert body == b"no peer is reached any more, b neither\n"
        assert await asyncio.to_thread(ask, free_port, "/healthz") == (200, b"ok\n")
        samples = await until(free_port, "allreduced_peer_losses_total", 1, peer="b")
        assert value(samples, "allreduced_peer_up", peer="b") == 0
        assert value(samples, "allreduced_link_resets_total", peer="b") == 1
        assert value(samples, "allreduced_ready") == 0
    assert agent.stop() == 0


async def test_an_agent_is_not_ready_before_it_has_reached_its_peers(start_agent: StartAgent, free_port: int) -> None:
    agent = start_agent("a", *LOOPBACK, "--peer", "b=tcp://127.0.0.1:9", ALLREDUCED_METRICS_LISTEN=str(free_port))
    async with asyncio.timeout(BOUND):
        status, body = await asyncio.to_thread(ask, free_port, "/readyz")
    assert (status, body) == (503, b"peer never reached: tcp://127.0.0.1:9\n")
    assert agent.stop() == 0


async def test_an_agent_that_stops_is_not_ready_while_it_waits_for_operations(
    start_agent: StartAgent, free_port: int
) -> None:
    agent = start_agent("a", ALLREDUCED_METRICS_LISTEN=str(free_port))
    async with asyncio.timeout(BOUND):
        async with group([agent], 2) as ranks:
            early = asyncio.ensure_future(ranks[0].all_reduce(np.ones(4)))
            await until(free_port, "allreduced_operations_in_flight", 1)
            assert await asyncio.to_thread(ask, free_port, "/readyz") == (200, b"ready\n")
            agent.process.send_signal(signal.SIGTERM)
            assert await until_ready(free_port, 503) == (503, b"the agent is stopping\n")
            assert await asyncio.to_thread(ask, free_port, "/healthz") == (200, b"ok\n")
            await ranks[1].close()  # so the operation ends, and the agent with it
            with pytest.raises(AllReducedError):
                await early
    assert agent.wait() == 0


def test_a_port_in_use_is_one_clear_error(start_agent: StartAgent, free_port: int) -> None:
    start_agent("a", ALLREDUCED_METRICS_LISTEN=str(free_port))
    with pytest.raises(NotStarted) as caught:
        start_agent("b", ALLREDUCED_METRICS_LISTEN=f"127.0.0.1:{free_port}")
    assert caught.value.status == 2
    error = caught.value.error
    assert isinstance(error, ConfigError)
    assert error.path == "metrics.listen"
    assert error.message == f"metrics cannot be served at 127.0.0.1:{free_port}: the port is in use"


def test_a_strange_name_and_other_methods_are_refused(start_agent: StartAgent, free_port: int) -> None:
    start_agent("a", ALLREDUCED_METRICS_LISTEN=str(free_port), ALLREDUCED_METRICS_HOSTS="metrics.example")
    assert ask(free_port, "/healthz", Host="evil.example")[0] == 421
    assert ask(free_port, "/healthz", Host="metrics.example:80")[0] == 200
    assert ask(free_port, "/healthz", "DELETE")[0] == 405
    assert ask(free_port, "/other")[0] == 404


async def test_each_refusal_counts_by_its_kind(start_agent: StartAgent, free_port: int) -> None:
    agent = start_agent(
        "a",
        *LOOPBACK,
        ALLREDUCED_METRICS_LISTEN=str(free_port),
        ALLREDUCED_SECRET="of the cluster",
        ALLREDUCED_ACCESS_JOB_SECRETS="required",
        ALLREDUCED_LIMITS_HELLO_TIMEOUT="5.0",  # more than any of those takes who are to be refused for something else
    )
    host, _, port = agent.listen.removeprefix("tcp://").rpartition(":")
    unix = agent.socket.replace("@", "\0", 1)

    def send(family: socket.AddressFamily, address: str | tuple[str, int], data: bytes) -> None:
        """Send something, and wait until the agent has closed the connection."""
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(BOUND)
            sock.connect(address)
            sock.sendall(data)
            if family == socket.AF_INET:
                until_closed(sock)

    def until_closed(sock: socket.socket) -> None:
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass

    kinds = ("protocol", "hung_up", "secret", *(("access",) if os.geteuid() == 0 else ()))
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]  # until limits.hello_timeout
        for times in range(1, 4):  # the third time nothing more is written about agents with another secret
            send(socket.AF_INET, (host, int(port)), b"GET / HTTP/1.1\r\n\r\n")
            send(socket.AF_INET, (host, int(port)), b"\x16\x03\x01")
            with pytest.raises(AuthenticationError, match="another secret"):
                await TcpTransport().connect(
                    agent.listen, Recorder(), LinkOptions(SecretAuthenticator("b", 7, b"of another cluster"))
                )
            send(socket.AF_UNIX, unix, b"\xff" * 64)  # a message of 4 GiB
            send(socket.AF_UNIX, unix, b"\0\0\0")  # the end of the connection comes before the end of the message
            silent[times - 1].settimeout(BOUND)
            silent[times - 1].connect(unix)
            with pytest.raises(AuthenticationError, match="job_secrets"):
                await join(agent, 0, 1)
            if os.geteuid() == 0:
                with pytest.raises(AuthenticationError, match="may not attach"), as_user(4321):
                    connect(job="job", rank=0, size=1, socket=agent.socket, deadline=BOUND)
            for kind in ("protocol", "hung_up"):
                await until(free_port, "allreduced_refusals_total", times, plane="clients", kind=kind)
            samples = await until(free_port, "allreduced_refusals_total", times, plane="peers", kind="secret")
            assert refusals(samples, "peers") == {"protocol": times, "tls": times, "secret": times}
            assert refusals(samples, "clients").items() >= dict.fromkeys(kinds, times).items()
        for sock in silent:
            until_closed(sock)
        samples = await until(free_port, "allreduced_refusals_total", 3, plane="clients", kind="timeout")
        assert refusals(samples, "clients") == dict.fromkeys((*kinds, "timeout"), 3)


async def until(port: int, name: str, wanted: float, **labels: str) -> Samples:
    """Scrape until a sample has a value; an agent rests between scrapes."""
    while True:
        samples = await asyncio.to_thread(scrape, port)
        if samples.get((name, frozenset(labels.items())), math.nan) == wanted:
            return samples


async def until_ready(port: int, status: int, body: bytes = b"") -> tuple[int, bytes]:
    """Ask until readiness is told so."""
    while True:
        answer = await asyncio.to_thread(ask, port, "/readyz")
        if answer[0] == status and answer[1].startswith(body):
            return answer
