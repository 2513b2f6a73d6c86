"""Agents of which some have RDMA devices: each link takes what both ends can, and both say what that is and why."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Callable

import pytest
from tests.support.fake_verbs import FakeFabric, FakeVerbs, device_info
from tests.support.peer_nodes import Node, both_up, end, make_node, until_logged

from allreduced.core.errors import ConfigError
from allreduced.daemon.carrier import Carriage, carried
from allreduced.daemon.peer_link import Target
from allreduced.transports.base import Transport
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.transport import AutoTransport, RdmaTransport
from allreduced.transports.registry import transport

HERE = "127.0.0.1"
BOTH = "fake0 port 1, GID 0 (127.0.0.1, RoCE v2), MTU 4096"
NO_DEVICES = FakeFabric()
NO_DEVICES.devices.clear()


class Machines:
    """Agents on one fabric; each is told which devices its machine has."""

    def __init__(self, *devices: str, mtus: tuple[int, ...] = ()) -> None:
        infos = [
            device_info(name, HERE, mtu=mtu)
            for name, mtu in itertools.zip_longest(devices or ("fake0",), mtus, fillvalue=4096)
            if isinstance(name, str)
        ]
        self.fabric = FakeFabric(*infos)
        self.nodes: list[Node] = []

    async def start(
        self, name: str, *devices: str, wanted: str = "auto", expected: bool = True, rdma: RdmaOptions | None = None
    ) -> Node:
        verbs = FakeVerbs(self.fabric if devices else NO_DEVICES, *devices)
        made: dict[str, Transport] = {
            "auto": AutoTransport(lambda: verbs),
            "rdma": RdmaTransport(lambda: verbs),
            "tcp": transport("tcp"),
        }
        find: Callable[[str], Transport] = carried(made.__getitem__, Carriage(wanted))
        node = await make_node(
            name,
            len(self.nodes) + 1,
            listen=f"tcp://{HERE}:0",
            find=find,
            rdma_expected=expected and wanted != "tcp",
            rdma=rdma,
        )
        self.nodes.append(node)
        return node

    async def link(self, one: Node, other: Node, one_name: str = "a", other_name: str = "b") -> None:
        one.peers.dial(Target(other.address, other_name))
        await both_up(one, other, one_name, other_name)


@pytest.fixture
async def machines() -> AsyncIterator[Callable[..., Machines]]:
    made: list[Machines] = []

    def make(*devices: str, mtus: tuple[int, ...] = ()) -> Machines:
        made.append(Machines(*devices, mtus=mtus))
        return made[-1]

    yield make
    for one in made:
        await end(one.nodes)
        assert one.fabric.leaks() == {}
        one.fabric.release()


def told(node: Node) -> dict[str, tuple[str, str]]:
    return {peer.node: (peer.transport, peer.way) for peer in node.peers.view()}


async def test_two_agents_with_devices_use_them(
    machines: Callable[..., Machines], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    here = machines()
    a, b = await here.start("a", "fake0"), await here.start("b", "fake0")
    await here.link(a, b)
    assert told(a) == {"b": ("rdma", BOTH)}
    assert told(b) == {"a": ("rdma", BOTH)}
    assert [peer.remote for peer in a.peers.view()] == [b.address]  # found at an address that tells no transport
    await until_logged(caplog, "event=link_used peer=b data=rdma", BOTH)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_job_may_mix_links_of_both_kinds(machines: Callable[..., Machines]) -> None:
    here = machines()
    a, b, c = await here.start("a", "fake0"), await here.start("b", "fake0"), await here.start("c")
    await here.link(a, b)
    await here.link(c, a, "c", "a")
    await both_up(b, c, "b", "c")
    lacks, other = "this machine has no RDMA device", "the other end declined: this machine has no RDMA device"
    assert told(a) == {"b": ("rdma", BOTH), "c": ("tcp", other)}
    assert told(b) == {"a": ("rdma", BOTH), "c": ("tcp", other)}
    assert told(c) == {"a": ("tcp", lacks), "b": ("tcp", lacks)}


@pytest.mark.parametrize("dialler", ["a", "b"])
async def test_an_agent_that_wants_tcp_gets_it_whoever_dials(
    machines: Callable[..., Machines], caplog: pytest.LogCaptureFixture, dialler: str
) -> None:
    here = machines()
    a, b = await here.start("a", "fake0"), await here.start("b", "fake0", wanted="tcp")
    one, other = (a, b) if dialler == "a" else (b, a)
    await here.link(one, other, *("ab" if dialler == "a" else "ba"))
    transport_, way = told(a)["b"]
    assert (transport_, way.removeprefix("the other end declined: ")) == ("tcp", "the other end uses TCP only")
    assert told(b) == {"a": ("tcp", "")}
    lines = {record.getMessage(): record.levelno for record in caplog.records}
    assert lines == {f"event=link_used peer=b data=tcp way={way!r}": logging.WARNING}  # a expected RDMA


async def test_ports_of_different_mtu_use_the_lower(machines: Callable[..., Machines]) -> None:
    here = machines("fake0", "fake1", mtus=(4096, 1024))
    a, b = await here.start("a", "fake0"), await here.start("b", "fake1")
    await here.link(a, b)
    assert told(a)["b"] == ("rdma", BOTH.replace("4096", "1024"))
    assert told(b)["a"] == ("rdma", BOTH.replace("4096", "1024").replace("fake0", "fake1"))


async def test_an_mtu_that_is_forced_and_that_the_other_lacks_leaves_tcp_and_says_why(
    machines: Callable[..., Machines],
) -> None:
    here = machines("fake0", "fake1", mtus=(4096, 1024))
    a, b = await here.start("a", "fake0", rdma=RdmaOptions(mtu=4096)), await here.start("b", "fake1")
    await here.link(a, b)
    reason = "rdma.mtu is 4096 here, and the peer's port has an MTU of 1024"
    assert told(a)["b"] == ("tcp", reason)
    assert told(b)["a"] == ("tcp", f"the other end declined: {reason}")


async def test_a_device_without_the_address_leaves_tcp_and_lists_what_there_is(
    machines: Callable[..., Machines],
) -> None:
    here = machines()
    here.fabric.devices["far"] = device_info("far", "10.9.9.9")
    a, b = await here.start("a", "fake0"), await here.start("b", "far")
    await here.link(a, b)
    transport_, way = told(b)["a"]
    assert transport_ == "tcp"
    assert way == (
        "no GID of an RDMA device here is 127.0.0.1, the address through which the peer is reached; there are:"
        " far port 1 GID 0 10.9.9.9 (RoCE v2, eth0)"
    )
    named = await here.start("c", "far", rdma=RdmaOptions(device="nothing"))
    await here.link(a, named, "a", "c")
    assert told(named)["a"] == ("tcp", "there is no RDMA device 'nothing'; there are: far")


async def test_a_device_that_cannot_be_opened_leaves_tcp(machines: Callable[..., Machines]) -> None:
    here = machines()

    def missing() -> FakeVerbs:
        raise ConfigError("RDMA cannot be used: pyverbs is not installed", hint="apt install python3-pyverbs")

    a = await here.start("a", "fake0")
    find = carried({"auto": AutoTransport(missing)}.__getitem__, Carriage("auto"))
    b = await make_node("b", 9, listen=f"tcp://{HERE}:0", find=find)
    here.nodes.append(b)
    await here.link(a, b)
    assert told(b)["a"] == ("tcp", "RDMA cannot be used: pyverbs is not installed")
