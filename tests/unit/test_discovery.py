"""Where an agent listens, whom it dials first, what it tells others, and when it needs a secret."""

from __future__ import annotations

import errno
import socket

import pytest
from tests.support.bound import Bound

from allreduced.core.addresses import parse_address
from allreduced.core.errors import AuthenticationError, ConfigError
from allreduced.daemon.discovery import Rendezvous, Static, discovery
from allreduced.daemon.peer_link import Target
from allreduced.daemon.reachability import advertised, check_access, resolve, source_address, stays_here
from allreduced.daemon.settings_reader import parse
from allreduced.transports.base import Listener

ALL = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"


class Network:
    """Listens where it may, else raises as a transport does."""

    def __init__(self, refused: dict[str, int]) -> None:
        self.refused = refused
        self.asked: list[str] = []

    async def listen(self, address: str) -> Listener:
        self.asked.append(address)
        if address in self.refused:
            raise ConfigError(f"cannot listen at {address}") from OSError(self.refused[address], "no")
        return Bound(address)


async def test_an_agent_alone_does_not_listen() -> None:
    network = Network({})
    found = await discovery(parse(None, "", {}, {}), "").find(network.listen)
    assert (found.listener, found.targets, network.asked) == (None, (), [])


async def test_an_agent_with_peers_listens_at_the_usual_port() -> None:
    network = Network({})
    settings = parse(None, "", {"ALLREDUCED_PEERS_STATIC": "b=tcp://10.0.0.2:4123"}, {})
    found = await discovery(settings, "").find(network.listen)
    assert found.targets == (Target("tcp://10.0.0.2:4123", "b"),)
    assert network.asked == [f"tcp://{ALL}:4123"]


async def test_an_address_alone_is_listened_at() -> None:
    network = Network({})
    found = await Static("tcp://127.0.0.1:0", ()).find(network.listen)
    assert found.listener is not None
    assert network.asked == ["tcp://127.0.0.1:0"]


async def test_who_can_listen_at_the_meeting_point_is_found_there() -> None:
    network = Network({})
    found = await Rendezvous("127.0.0.1:4200").find(network.listen)
    assert found.listener is not None
    assert (found.listener.address, found.targets) == ("tcp://127.0.0.1:4200", ())


async def test_others_on_its_machine_dial_it_and_listen_at_a_free_port() -> None:
    network = Network({"tcp://127.0.0.1:4200": errno.EADDRINUSE})
    found = await Rendezvous("127.0.0.1:4200").find(network.listen)
    assert found.listener is not None
    assert found.listener.address == "tcp://127.0.0.1:0"
    assert (found.targets, found.taken) == ((Target("tcp://127.0.0.1:4200"),), "tcp://127.0.0.1:4200")


@pytest.mark.parametrize(("refused", "port"), [({}, 4200), ({"tcp://10.0.0.2:4200": errno.EADDRINUSE}, 0)])
async def test_others_on_other_machines_listen_at_the_same_port_if_they_can(
    refused: dict[str, int], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def source_address(host: str) -> str:
        return {"10.0.0.1": "10.0.0.2"}[host]

    monkeypatch.setattr("allreduced.daemon.discovery.source_address", source_address)
    network = Network({"tcp://10.0.0.1:4200": errno.EADDRNOTAVAIL, **refused})
    found = await Rendezvous("10.0.0.1:4200").find(network.listen)
    assert found.listener is not None
    assert found.listener.address == f"tcp://10.0.0.2:{port}"
    assert (found.targets, found.taken) == ((Target("tcp://10.0.0.1:4200"),), "")


async def test_an_agent_that_must_listen_elsewhere_only_dials() -> None:
    network = Network({})
    found = await Rendezvous("127.0.0.1:4200", "tcp://127.0.0.1:0").find(network.listen)
    assert network.asked == ["tcp://127.0.0.1:0"]
    assert found.targets == (Target("tcp://127.0.0.1:4200"),)


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine know the name ``head`` as 127.0.1.1, as Debian's /etc/hosts has it."""

    async def resolve(host: str) -> tuple[str, ...]:
        return ("127.0.1.1",) if host == "head" else (host,)

    monkeypatch.setattr("allreduced.daemon.reachability.resolve", resolve)


@pytest.mark.usefixtures("debian")
async def test_the_own_name_known_as_loopback_is_listened_at_everywhere() -> None:
    network = Network({})
    found = await Rendezvous("head:4200").find(network.listen)
    assert (network.asked, found.targets) == ([f"tcp://{ALL}:4200"], ())
    network = Network({f"tcp://{ALL}:4200": errno.EADDRINUSE})
    found = await Rendezvous("head:4200").find(network.listen)
    assert network.asked == [f"tcp://{ALL}:4200", f"tcp://{ALL}:0"]
    assert (found.targets, found.taken) == ((Target("tcp://head:4200"),), f"tcp://{ALL}:4200")


@pytest.mark.usefixtures("debian")
async def test_the_own_name_known_as_loopback_without_a_secret_is_a_clear_error() -> None:
    async def listen(address: str) -> Listener:
        parsed = parse_address(address)
        check_access(parsed, local=await stays_here(parsed), guarded=False, insecure=False)
        return Bound(address)

    with pytest.raises(AuthenticationError, match=r"head:4200, which this machine knows as its own loopback") as caught:
        await Rendezvous("head:4200").find(listen)
    assert "ALLREDUCED_SECRET" in caught.value.hint
    assert "127.0.0.1" in caught.value.hint
    found = await Rendezvous("127.0.0.1:4200").find(listen)
    assert found.listener is not None
    assert found.listener.address == "tcp://127.0.0.1:4200"


async def test_other_reasons_not_to_listen_are_errors() -> None:
    network = Network({"tcp://127.0.0.1:80": errno.EACCES})
    with pytest.raises(ConfigError):
        await Rendezvous("127.0.0.1:80").find(network.listen)


def test_a_wildcard_is_no_meeting_point() -> None:
    with pytest.raises(ConfigError, match="cannot be dialled"):
        Rendezvous("0.0.0.0:4200")


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:4123", "tcp://0.0.0.0:4123", "tcp://[::]:4123"])
def test_who_can_be_reached_from_outside_needs_a_secret_or_leave(address: str) -> None:
    parsed = parse_address(address)
    with pytest.raises(AuthenticationError) as caught:
        check_access(parsed, local=False, guarded=False, insecure=False)
    assert "ALLREDUCED_SECRET" in caught.value.hint
    assert "ALLREDUCED_INSECURE=1" in caught.value.hint
    check_access(parsed, local=False, guarded=True, insecure=False)
    check_access(parsed, local=False, guarded=False, insecure=True)
    check_access(parsed, local=True, guarded=False, insecure=False)


async def test_loopback_is_not_told_to_peers_elsewhere() -> None:
    loopback = parse_address("tcp://127.0.0.1:4123")
    with pytest.raises(ConfigError, match="which is themselves"):
        await advertised(loopback, "", ["tcp://192.0.2.1:4123"])
    with pytest.raises(ConfigError, match="which is themselves"):
        await advertised(parse_address("tcp://0.0.0.0:4123"), "tcp://localhost:1", ["tcp://192.0.2.1:4123"])
    assert await advertised(loopback, "", ["tcp://[::1]:4123"]) == "tcp://127.0.0.1:4123"


@pytest.mark.parametrize("address", ["tcp://169.254.1.1:4123", "tcp://[fe80::1]:4123"])
async def test_addresses_of_one_link_are_not_told_to_peers_elsewhere(address: str) -> None:
    with pytest.raises(ConfigError, match="on one link only"):
        await advertised(parse_address(address), "", ["tcp://192.0.2.1:4123"])
    assert await advertised(parse_address(address), "", []) == address


async def test_what_is_told_differs_from_where_is_listened() -> None:
    everywhere = parse_address("tcp://0.0.0.0:4123")
    assert await advertised(everywhere, "tcp://10.9.8.7:99", ["tcp://192.0.2.1:4123"]) == "tcp://10.9.8.7:99"
    assert await advertised(everywhere, "", []) == ""
    with pytest.raises(ConfigError, match="cannot be dialled"):
        await advertised(everywhere, "tcp://0.0.0.0:4123", [])


async def test_names_and_numbers_of_this_machine_stay_here() -> None:
    assert await stays_here(parse_address("tcp://localhost:1"))
    assert await stays_here(parse_address("tcp://[::1]:1"))
    assert not await stays_here(parse_address("tcp://192.0.2.1:1"))
    assert not await stays_here(parse_address("tcp://no-such-name.invalid:1"))
    assert await resolve("::1") == ("::1",)


async def test_the_own_address_comes_from_the_route() -> None:
    assert await source_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigError, match="no way to"):
        await source_address("no-such-name.invalid")
