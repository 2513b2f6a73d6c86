"""What carries the data of links: decided at start, hidden behind tcp addresses, told in the log and the status."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from typing import ClassVar

import pytest
from tests.support.fake_verbs import FakeFabric, FakeVerbs, device_info
from tests.support.peer_nodes import both_up, end, make_node

from allreduced.core.errors import AgentUnavailable, ConfigError
from allreduced.daemon.carrier import Carriage, carried, outside
from allreduced.daemon.peer_link import Target
from allreduced.daemon.rdma_use import choose, decide, examine
from allreduced.daemon.reachability import same_host
from allreduced.daemon.settings import Settings
from allreduced.daemon.settings_reader import parse
from allreduced.transports.base import Link, LinkAccepted, LinkEvents, LinkOptions, Listener, Transport
from allreduced.transports.rdma.checks import Finding
from allreduced.transports.rdma.host import HostDevice, HostFacts, device_names
from allreduced.transports.rdma.verbs_port import Verbs
from allreduced.transports.registry import transport

ABSENT = Finding("absent", True, "this machine has no RDMA device", "load a driver")
LOCKED = Finding("memlock", True, "this process may lock 8 MiB", "ulimit -l unlimited")
DOWN = Finding("port", False, "no RDMA port is active", "see `rdma link`")


# The decision


def test_tcp_is_used_without_a_look_where_it_is_asked_for() -> None:
    assert decide("tcp", (LOCKED,)) == Carriage("tcp")
    assert choose(parse('[peers]\ntransport = "tcp"\n', "", {}, {}), 1 << 30) == Carriage("tcp")


@pytest.mark.parametrize("wanted", ["auto", "rdma"])
def test_what_is_not_serious_does_not_stand_in_the_way(wanted: str) -> None:
    assert decide(wanted, ()) == decide(wanted, (DOWN,)) == Carriage(wanted)


def test_auto_falls_back_to_tcp_and_knows_why() -> None:
    assert decide("auto", (LOCKED, DOWN)) == Carriage("tcp", "this process may lock 8 MiB", "ulimit -l unlimited")
    # A machine without RDMA is nothing to warn of.
    assert decide("auto", (ABSENT,)) == Carriage("tcp", "this machine has no RDMA device", "")


def test_rdma_that_is_asked_for_and_cannot_be_is_an_error_with_what_mends_it() -> None:
    with pytest.raises(ConfigError) as caught:
        decide("rdma", (LOCKED, Finding("binding", True, "pyverbs is not installed", "apt"), DOWN))
    assert caught.value.message == (
        "peers.transport is rdma, and RDMA cannot be used: this process may lock 8 MiB; pyverbs is not installed"
    )
    assert (caught.value.path, caught.value.hint) == ("peers.transport", "ulimit -l unlimited")


@pytest.mark.skipif(bool(device_names()), reason="this machine has an RDMA device")
def test_on_a_machine_without_rdma_auto_is_tcp_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert choose(Settings(), 1 << 30) == Carriage("tcp", "this machine has no RDMA device", "")
    assert not caplog.records
    with pytest.raises(ConfigError, match="this machine has no RDMA device"):
        choose(parse('[peers]\ntransport = "rdma"\n', "", {}, {}), 1 << 30)


@pytest.mark.skipif(bool(device_names()), reason="this machine has an RDMA device")
def test_on_a_machine_without_rdma_nothing_of_verbs_is_loaded() -> None:
    program = """
import sys
from allreduced.daemon.rdma_use import choose
from allreduced.daemon.settings import Settings
choose(Settings(), 1 << 30)
print([name for name in sys.modules if "verbs" in name])
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout == "['allreduced.transports.rdma.verbs_port']\n"  # plain data


# What is looked at


class Machine:
    """A machine with one device, as ``examine`` sees it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.host = HostFacts((HostDevice("fake0", "/dev/infiniband/uverbs0", "allowed"),), "found", None)
        self.verbs: Verbs | ConfigError = FakeVerbs(FakeFabric())
        self.loaded = 0
        patch.setattr("allreduced.daemon.rdma_use.device_names", lambda: ("fake0",))
        patch.setattr("allreduced.daemon.rdma_use.host_facts", lambda: self.host)
        patch.setattr("allreduced.transports.rdma.verbs.load", self.load)

    def load(self) -> Verbs:
        self.loaded += 1
        if isinstance(self.verbs, ConfigError):
            raise self.verbs
        return self.verbs

    def found(self, **options: object) -> list[tuple[str, bool]]:
        settings = parse(None, "", {}, {f"rdma.{key}": value for key, value in options.items()})
        return [(one.subject, one.serious) for one in examine(settings, 1 << 30).findings]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_machine_that_has_everything_uses_rdma(machine: Machine) -> None:
    assert machine.found() == []
    assert machine.loaded == 1
    assert choose(Settings(), 1 << 30) == Carriage("auto")
    assert choose(parse('[peers]\ntransport = "rdma"\n', "", {}, {}), 1 << 30) == Carriage("rdma")


def test_pyverbs_is_not_loaded_where_something_else_stands_in_the_way(machine: Machine) -> None:
    machine.host = replace(machine.host, memlock=64 << 10)
    assert machine.found() == [("memlock", True)]
    machine.host = replace(machine.host, memlock=None, binding="missing")
    assert machine.found() == [("binding", True)]
    machine.host = replace(machine.host, binding="found")
    assert machine.found(device="mlx5_9") == [("device", True)]
    assert machine.loaded == 0


def test_pyverbs_that_cannot_be_loaded_is_told_with_its_error(machine: Machine) -> None:
    machine.verbs = ConfigError("RDMA cannot be used: undefined symbol", hint="install")
    machine.host = replace(machine.host, memlock=512 << 20)
    assert machine.found() == [("binding", True), ("memlock", False)]
    assert choose(Settings(), 1 << 30) == Carriage("tcp", "RDMA cannot be used: undefined symbol", "install")


def test_what_devices_lack_is_found_and_logged(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    weak = replace(device_info("fake0", "10.0.0.1"), max_regions=10, max_region_size=1 << 40)
    machine.verbs = FakeVerbs(FakeFabric(weak))
    assert machine.found() == [("limits", False)]
    assert choose(Settings(), 1 << 30) == Carriage("auto")
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("event=rdma_limited reason='the RDMA device fake0 has 10 memory regions")


# Links


class Auto(Transport):
    """Stands for a transport that carries data in one of two ways, under addresses of its own scheme."""

    scheme: ClassVar[str] = "auto"

    def __init__(self, data_path: str, fallback_reason: str) -> None:
        self._inner = transport("inproc")
        self._told = data_path, fallback_reason

    async def listen(self, address: str, accepted: LinkAccepted, options: LinkOptions) -> Listener:
        def told(link: Link) -> LinkEvents:
            self._tell(link)
            return accepted(link)

        listener = await self._inner.listen(address.replace("auto://", "inproc://"), told, options)
        listener.address = listener.address.replace("inproc://", "auto://")
        return listener

    async def connect(self, address: str, events: LinkEvents, options: LinkOptions) -> Link:
        if "nobody" in address:
            raise AgentUnavailable(f"{address}: no answer in time")
        link = await self._inner.connect(address.replace("auto://", "inproc://"), events, options)
        self._tell(link)
        return link

    def _tell(self, link: Link) -> None:
        link.local_address = link.local_address.replace("inproc://", "auto://")
        link.remote_address = link.remote_address.replace("inproc://", "auto://")
        link.data_path, link.fallback_reason = self._told


async def told_by(
    carriage: Carriage, data_path: str = "", fallback_reason: str = "", *, expected: bool = False
) -> tuple[str, str, str]:
    """Return what an agent with this decision tells of its link: transport, way, and its address."""
    fake = Auto(data_path, fallback_reason)
    inner = {"auto": fake, "tcp": fake, "inproc": transport("inproc")}
    find = carried(inner.__getitem__, carriage)
    a = await make_node("a", 1, listen="tcp://{}:0", find=find, rdma_expected=expected)
    b = await make_node("b", 2, listen="tcp://{}:0", find=find, rdma_expected=expected)
    try:
        assert a.address.startswith("tcp://a:")
        a.peers.dial(Target(b.address, "b"))
        await both_up(a, b)
        [near], [far] = a.peers.view(), b.peers.view()
        assert (near.transport, near.way) == (far.transport, far.way)
        return near.transport, near.way, near.remote
    finally:
        await end([a, b])


async def test_a_link_by_rdma_tells_its_device(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    transport_, way, remote = await told_by(Carriage("auto"), "rdma mlx5_0 port 1, MTU 4096", expected=True)
    assert (transport_, way) == ("rdma", "mlx5_0 port 1, MTU 4096")
    assert remote.startswith("tcp://b:")
    lines = [record for record in caplog.records if "event=link_used" in record.getMessage()]
    assert [record.levelno for record in lines] == [logging.INFO] * 2
    assert lines[0].getMessage().endswith("data=rdma way='mlx5_0 port 1, MTU 4096'")


async def test_a_link_by_tcp_where_rdma_was_expected_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    reason = "the peer has no RDMA device"
    assert (await told_by(Carriage("auto"), "", reason, expected=True))[:2] == ("tcp", reason)
    lines = [record for record in caplog.records if "event=link_used" in record.getMessage()]
    assert {record.levelno for record in lines} == {logging.WARNING}
    assert {record.getMessage() for record in lines} == {
        f"event=link_used peer={node} data=tcp way={reason!r}" for node in ("a", "b")
    }


async def test_an_agent_that_cannot_use_its_device_says_so_once_and_links_tell_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    carriage = Carriage("tcp", "this process may lock 8 MiB", "ulimit -l unlimited")
    assert (await told_by(carriage))[:2] == ("tcp", "this process may lock 8 MiB")
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    # Two agents share the decision here.
    assert lines == ["event=rdma_not_used reason='this process may lock 8 MiB' hint='ulimit -l unlimited'"]


async def test_an_agent_without_a_device_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    told = await told_by(Carriage("tcp", "this machine has no RDMA device"))
    assert told[:2] == ("tcp", "this machine has no RDMA device")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_errors_name_addresses_as_they_were_given() -> None:
    fake = Auto("", "")
    find = carried({"auto": fake}.__getitem__, Carriage("auto"))
    node = await make_node("a", 1, listen="tcp://{}:0", find=find)
    try:
        with pytest.raises(AgentUnavailable) as caught:
            await find("tcp").connect("tcp://nobody:1", None, None)  # type: ignore[arg-type] # it fails before
        assert str(caught.value) == "tcp://nobody:1: no answer in time"
    finally:
        await end([node])


def test_other_schemes_and_plain_tcp_are_what_they_are() -> None:
    assert carried(transport, Carriage("auto"))("inproc") is transport("inproc")
    assert carried(transport, Carriage("tcp"))("tcp") is transport("tcp")
    chosen = carried(transport, Carriage("tcp", "why"))
    assert chosen("tcp") is chosen("tcp")
    assert chosen("tcp").scheme == "tcp"


def test_addresses_are_told_without_what_carries_data() -> None:
    assert outside("auto://10.0.0.1:4123") == "tcp://10.0.0.1:4123"
    assert outside("rdma://[::1]:4123") == "tcp://[::1]:4123"
    assert same_host("tcp://10.0.0.1:4123", "rdma://10.0.0.1:55555")
    assert not same_host("tcp://10.0.0.1:4123", "tcp://10.0.0.2:4123")
    assert same_host("inproc://a:1", "inproc://b:2")
    assert not same_host("inproc://a:1", "tcp://a:1")
