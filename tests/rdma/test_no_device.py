"""Agents on a machine without an RDMA device: who insists is told so, who does not takes TCP and says why."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
from tests.contract.conftest import Recorder
from tests.integration.agents import AgentProcess, NotStarted, end_processes
from tests.rdma import device
from tests.rdma.addresses import Addresses, host
from tests.rdma.job import PATIENCE, TIMEOUT, WORK, RdmaCluster
from tests.rdma.nursery import Nursery
from tests.rdma.starter import FromNursery

from allreduced.core.errors import AgentUnavailable, ConfigError
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports.base import LinkOptions
from allreduced.transports.rdma import verbs
from allreduced.transports.registry import transport

LISTENING, DIALLING = (LinkOptions(SecretAuthenticator(name, number, b"hush")) for number, name in enumerate("ab", 1))


@pytest.fixture(autouse=True)
def no_device(nothing_held: None) -> Iterator[None]:
    """Take the device away during the test; nobody uses it."""
    device.remove()
    yield
    device.restore()


def test_verbs_have_no_device() -> None:
    assert list(verbs.load().devices()) == []


def test_an_agent_that_insists_is_told_that_there_is_none(nursery: Nursery) -> None:
    network = Addresses(ALLREDUCED_PEERS_TRANSPORT="rdma")
    started: list[AgentProcess] = []
    with tempfile.NamedTemporaryFile(prefix="pytest-", suffix=".log") as log:
        try:
            with pytest.raises(NotStarted) as caught:
                started.append(FromNursery(nursery).agent("node0", network.arguments(0), network.environment(), log))
        finally:
            end_processes(started)
    error = caught.value.error
    assert isinstance(error, ConfigError), caught.value
    assert caught.value.status == 2
    assert error.message == "peers.transport is rdma, and RDMA cannot be used: this machine has no RDMA device"
    assert "rdma link" in error.hint


def test_agents_that_do_not_insist_take_tcp_and_say_why(nursery: Nursery) -> None:
    with RdmaCluster((0, 0, 1, 1), nursery, "auto") as cluster:
        cluster.form(WORK)
        cluster.wait(lambda: set(cluster.links().values()) == {"tcp"}, TIMEOUT + PATIENCE, "a link")
        cluster.work_for(1)
        for node, other in ((0, "node1"), (1, "node0")):
            assert cluster.ways(node) == {other: "this machine has no RDMA device"}
            cluster.wait(lambda: "event=link_used" in cluster.logged(node), PATIENCE, "it says which way a link takes")  # noqa: B023 # called at once
            used = [line for line in cluster.logged(node).splitlines() if "event=link_used" in line]
            assert all("data=tcp way='this machine has no RDMA device'" in line for line in used), used
        cluster.finish()
        assert cluster.stop_all() == []


async def test_a_link_that_must_be_rdma_is_refused() -> None:
    with pytest.raises(ConfigError, match="this machine has no RDMA device"):
        await transport("rdma").listen(f"rdma://{host(0)}:0", lambda link: Recorder(), LISTENING)
    listener = await transport("auto").listen(f"auto://{host(0)}:0", lambda link: Recorder(), LISTENING)
    try:
        with pytest.raises(AgentUnavailable, match=r"no RDMA link to .*: this machine has no RDMA device"):
            await transport("rdma").connect(listener.address.replace("auto://", "rdma://"), Recorder(), DIALLING)
    finally:
        await listener.close()
