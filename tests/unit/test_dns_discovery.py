"""Agents behind a name: who is dialled, what is told while nobody is known, and what an answer changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from tests.support.bound import Bound
from tests.support.virtual_loop import run_virtually

from allreduced.core.errors import ConfigError
from allreduced.daemon.discovery import discovery
from allreduced.daemon.discovery_port import Found, Listing
from allreduced.daemon.dns_discovery import FIRST_LOOKUP, Dns, is_here, listing, parse_name
from allreduced.daemon.names import NameUnknown, Places, addresses_of
from allreduced.daemon.peer_link import Target
from allreduced.daemon.settings_reader import parse
from allreduced.transports.base import Listener


async def listen(address: str) -> Listener:
    return Bound(address)


@dataclass
class Resolver:
    """Answers as it is told: with places, with a reason why there are none, or (None) never."""

    answer: Places | str | None
    asked: list[float] = field(default_factory=list)
    told: list[Listing] = field(default_factory=list)
    here: str = "10.0.0.1"

    async def lookup(self, name: str, port: int) -> Places:
        self.asked.append(asyncio.get_running_loop().time())
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, str):
            raise NameUnknown(self.answer)
        return self.answer or ()

    async def is_here(self, host: str) -> bool:
        return host == self.here

    def dns(self, name: str = "agents:4123", listen: str = "") -> Dns:
        return Dns(name, listen=listen, interval=10.0, lookup=self.lookup, here=self.is_here)

    async def follow(self, dns: Dns, until: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.get_running_loop().create_task(dns.follow("", self.told.append))
        await until()
        task.cancel()
        await asyncio.wait([task])


def targets(*hosts: str) -> frozenset[Target]:
    return frozenset(Target(f"tcp://{host}:4123") for host in hosts)


def at(*hosts: str) -> Places:
    return tuple((host, 4123) for host in hosts)


async def test_all_addresses_are_dialled_but_the_own_one() -> None:
    found = await Resolver(at("10.0.0.2", "10.0.0.1", "fd00::3")).dns().find(listen)
    assert found.listing == Listing(targets("10.0.0.2", "[fd00::3]"), own="tcp://10.0.0.1:4123")
    assert (found.targets, found.taken) == ((), "")


async def test_an_agent_listens_everywhere_at_the_port_of_the_name() -> None:
    found = await Resolver(()).dns("agents:5000").find(listen)
    assert found.listener is not None
    assert found.listener.address in ("tcp://[::]:5000", "tcp://0.0.0.0:5000")


async def test_who_listens_at_one_address_is_found_there_only() -> None:
    resolver = Resolver(at("10.0.0.1", "10.0.0.7"))
    found = await resolver.dns(listen="tcp://10.0.0.7:4123").find(listen)
    assert found.listing == Listing(targets("10.0.0.1"), own="tcp://10.0.0.7:4123")
    # Another port of this machine is another agent.
    found = await resolver.dns(listen="tcp://0.0.0.0:9").find(listen)
    assert found.listing == Listing(targets("10.0.0.1", "10.0.0.7"))


async def test_the_places_of_a_service_have_their_own_ports() -> None:
    resolver = Resolver((("10.0.0.1", 4123), ("10.0.0.2", 7), ("10.0.0.2", 8)))
    found = await resolver.dns("_allreduced._tcp.agents").find(listen)
    assert found.listing.targets == {Target("tcp://10.0.0.2:7"), Target("tcp://10.0.0.2:8")}
    assert found.listing.own == "tcp://10.0.0.1:4123"


def test_what_cannot_be_dialled_is_left_out_and_there_is_a_limit() -> None:
    places = (("0.0.0.0", 1), ("::", 1), ("10.0.0.9", 0), *at("10.0.0.3", "10.0.0.2", "10.0.0.1"))
    found = listing("tcp", places, (), limit=2)
    assert found.targets == targets("10.0.0.1", "10.0.0.2")
    assert found.problem == "only 2 of 3 addresses are dialled"


async def test_a_name_that_is_not_known_yet_is_no_error_but_told(caplog: pytest.LogCaptureFixture) -> None:
    found = await Resolver("Name or service not known").dns().find(listen)
    assert found.listing == Listing(problem="the name agents:4123 is not known: Name or service not known")
    assert "event=name_unknown name=agents:4123 reason='Name or service not known'" in caplog.text


def test_a_name_is_looked_up_soon_while_it_is_unknown_and_then_at_the_interval(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)

    async def scene() -> None:
        loop, resolver = asyncio.get_running_loop(), Resolver("not known")
        dns, begin = resolver.dns(), loop.time()
        await dns.find(listen)
        await resolver.follow(dns, lambda: asyncio.sleep(40.0))
        assert [at - begin for at in resolver.asked] == pytest.approx([0, 1, 3, 7, 15, 25, 35])
        assert resolver.told == []  # the problem is the one that was there at the start

        resolver.answer = at("10.0.0.2")
        await resolver.follow(dns, lambda: asyncio.sleep(31.0))
        assert resolver.told == [Listing(targets("10.0.0.2"))]

    run_virtually(scene())
    assert caplog.text.count("event=name_unknown") == 1


def test_each_new_answer_is_the_listing_and_a_failure_leaves_it_as_it_is() -> None:
    async def scene() -> None:
        resolver = Resolver(at("10.0.0.2"))
        dns = resolver.dns()
        await dns.find(listen)

        async def until() -> None:
            for answer in (at("10.0.0.2"), at("10.0.0.3", "10.0.0.2"), at("10.0.0.2", "10.0.0.3"), "no server", at()):
                resolver.answer = answer
                await asyncio.sleep(10.0)

        await resolver.follow(dns, until)
        both = targets("10.0.0.2", "10.0.0.3")
        assert resolver.told == [
            Listing(both),
            Listing(both, problem="the name agents:4123 is not known: no server"),
            Listing(),
        ]

    run_virtually(scene())


def test_a_question_without_answer_holds_nobody_up_and_is_not_asked_twice() -> None:
    async def scene() -> None:
        loop, resolver = asyncio.get_running_loop(), Resolver(None)
        dns, begin = resolver.dns(), loop.time()
        found = await dns.find(listen)
        assert loop.time() - begin == pytest.approx(FIRST_LOOKUP)
        assert found.listing.problem == "the name agents:4123 is not known: no answer for 5 s"
        await resolver.follow(dns, lambda: asyncio.sleep(100.0))
        assert len(resolver.asked) == 1

    run_virtually(scene())


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("agents:4123", "tcp://agents:4123"),
        ("Agents.example.org.:80", "tcp://agents.example.org.:80"),
        ("rdma://agents:4123", "rdma://agents:4123"),
        ("_allreduced._tcp.agents", "tcp://_allreduced._tcp.agents:0"),
    ],
)
def test_names_are_written_with_a_port_and_services_without(text: str, parsed: str) -> None:
    assert str(parse_name(text)) == parsed


@pytest.mark.parametrize("text", ["agents", "agents:0", ":4123", "a b:1", "_x._tcp.a b"])
def test_a_malformed_name_is_a_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match="malformed") as caught:
        parse(None, "", {"ALLREDUCED_PEERS_DNS": text}, {})
    assert caught.value.path == "ALLREDUCED_PEERS_DNS"
    assert "_allreduced._tcp.agents" in caught.value.hint


async def test_listed_agents_are_dialled_besides() -> None:
    settings = parse(
        None, "", {"ALLREDUCED_PEERS_STATIC": "b=tcp://10.0.0.2:1", "ALLREDUCED_PEERS_DNS": "localhost:4123"}, {}
    )
    found: Found = await discovery(settings, "").find(listen)
    assert found.targets == (Target("tcp://10.0.0.2:1", "b"),)
    assert found.listing.targets <= targets("127.0.0.1", "[::1]")


async def test_the_hosts_file_and_the_resolver_of_the_system_are_asked() -> None:
    assert ("127.0.0.1", 4123) in await addresses_of("localhost", 4123)
    for name in ("no-such-name.invalid", ".", "a..b", "a" * 64):
        with pytest.raises(NameUnknown):
            await addresses_of(name, 4123)


async def test_own_addresses_are_known_by_the_way_to_them() -> None:
    assert await is_here("127.0.0.1")
    assert not await is_here("192.0.2.77")
    assert not await is_here("no-such-name.invalid")
