"""Services looked up at a real DNS server, of this process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import dns.asyncresolver
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from allreduced.core.errors import ConfigError
from allreduced.daemon.names import NameUnknown, places_of


class Server(asyncio.DatagramProtocol):
    """Answers questions for SRV records out of ``zone``: the text of the records by name."""

    def __init__(self, zone: dict[str, list[str]]) -> None:
        self._zone = zone
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)  # uvloop's is none by its class

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        name = query.question[0].name
        records = self._zone.get(name.to_text(omit_final_dot=True))
        if records is None:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif records:
            answer.answer.append(dns.rrset.from_text(name, 5, "IN", "SRV", *records))
        assert self._transport is not None
        self._transport.sendto(answer.to_wire(), address)


@asynccontextmanager
async def serving(zone: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Let services be looked up in ``zone``."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: Server(zone), local_addr=("127.0.0.1", 0))
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = ["127.0.0.1"]
    resolver.port = transport.get_extra_info("sockname")[1]
    resolver.domain = dns.name.root
    monkeypatch.setattr(dns.asyncresolver, "default_resolver", resolver)
    try:
        yield
    finally:
        transport.close()


async def test_a_service_leads_to_the_places_of_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    records = ["0 5 4123 localhost.", "0 5 7000 localhost.", "0 5 4123 localhost.", "0 5 1 no-such-name.invalid."]
    async with serving({"_allreduced._tcp.agents": records}, monkeypatch):
        places = await places_of("_allreduced._tcp.agents", 0)
    assert {port for _, port in places} == {4123, 7000}
    assert ("127.0.0.1", 7000) in places
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("zone", "reason"),
    [
        ({}, "does not exist"),
        ({"_allreduced._tcp.agents": []}, "does not contain an answer"),
        ({"_allreduced._tcp.agents": ["0 5 1 no-such-name.invalid."]}, "no-such-name.invalid: "),
        ({"_allreduced._tcp.agents": ["0 0 0 ."]}, "says that there is no such service"),
        ({"_allreduced._tcp.agents": ["0 0 0 .", "0 5 1 no-such-name.invalid."]}, r"'\.' is no name of a host"),
    ],
)
async def test_a_service_that_is_not_known_says_why(
    zone: dict[str, list[str]], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(zone, monkeypatch):
        with pytest.raises(NameUnknown, match=reason):
            await places_of("_allreduced._tcp.agents", 0)


async def test_without_dnspython_a_service_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dns.asyncresolver", None)
    with pytest.raises(ConfigError, match="dnspython is needed") as caught:
        await places_of("_allreduced._tcp.agents", 0)
    assert "allreduced[dns]" in caught.value.hint
