"""The addresses of this node: what it tells others, which interface that is, and what names mean here."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from allreduced.core.addresses import Address, is_link_local, is_loopback, is_wildcard, parse_address
from allreduced.daemon.discovery import listening
from allreduced.daemon.dns_discovery import FIRST_LOOKUP, is_here, parse_name
from allreduced.daemon.doctor.finding import Finding, note, ok, problem, warning
from allreduced.daemon.names import NameUnknown, addresses_of, places_of
from allreduced.daemon.reach import Dialled, dial_once
from allreduced.daemon.reachability import resolve, source_address, stays_here
from allreduced.daemon.settings import Settings
from allreduced.transports.rdma.interfaces import interface_of

SMALL_MTU: Final = 1400
"""Bytes of a packet below which something on the way (a tunnel) takes much."""

MOST_DIALLED: Final = 64
"""Places behind a name that are dialled: enough to see that it is right."""

MOST_AT_ONCE: Final = 256
"""Places that are dialled at the same time."""

_OTHER_DESCRIPTORS: Final = 40
_DESCRIPTORS_PER_DIAL: Final = 3
"""Files that one dial has open at most: its socket, and what the resolver asks with."""

_BRIDGES: Final = ("docker", "br-", "virbr", "cni", "lxcbr", "podman", "cbr", "flannel", "veth")


@dataclass(frozen=True, slots=True)
class Interface:
    """The network interface of an address; ``name`` empty where none has it. ``bridge``: of containers or guests."""

    name: str
    mtu: int
    bridge: bool


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """One listed agent. ``addresses``: what its name means here. ``local``: it is on this machine."""

    node: str
    address: str
    addresses: tuple[str, ...]
    local: bool
    dialled: Dialled


@dataclass(frozen=True, slots=True)
class NameFacts:
    """The name behind which agents are (``peers.dns``).

    ``places``: what it leads to, this agent's own place included. ``problem``: why it leads nowhere, or empty.
    """

    name: str
    places: tuple[str, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """What there is.

    ``host``: this machine's name, and what it means here. ``advertised``: where others are told to dial; empty where
    there are no others, or that is not known. ``listening``: the setting, maybe empty. ``peers``: those of the list,
    and those behind the name. ``name``: None where there is none.
    """

    host: str
    host_addresses: tuple[str, ...]
    listening: str
    advertised: str
    advertised_here: bool
    interface: Interface | None
    ipv6: bool
    peers: tuple[PeerFacts, ...]
    name: NameFacts | None = None


async def network_facts(settings: Settings) -> NetworkFacts:
    """Look names up and dial each listed agent once, as many at the same time as descriptors allow.

    Takes some seconds for each :func:`at_once` of them where the system's resolver answers, else as long as that one
    waits.

    :raises AllReducedError: an address in the settings is malformed.
    """
    host = socket.gethostname()
    peers = settings.peers
    named = [(peer.node, parse_address(peer.address)) for peer in peers.static]
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = asyncio.Semaphore(at_once(None if soft == resource.RLIM_INFINITY else soft))
    found, listed, (name, behind) = await asyncio.gather(
        resolve(host),
        asyncio.gather(*(_peer(node, address, room) for node, address in named)),
        _behind_name(settings, room),
    )
    listed += behind
    told = await _told(settings, listed)
    here = bool(told) and await stays_here(parse_address(told, any_port=True))
    interface = None
    if told:
        numeric = await resolve(parse_address(told, any_port=True).host)
        interface = interface_facts(numeric[0]) if numeric else None
    ipv6 = socket.has_dualstack_ipv6()
    return NetworkFacts(host, found, peers.listen, told, here, interface, ipv6, tuple(listed), name)


def at_once(descriptors: int | None) -> int:
    """Return how many places are dialled at once by a process that may open so many files, None for no limit. Pure."""
    if descriptors is None:
        return MOST_AT_ONCE
    return min(MOST_AT_ONCE, max(1, (descriptors - _OTHER_DESCRIPTORS) // _DESCRIPTORS_PER_DIAL))


def judge_network(facts: NetworkFacts) -> Iterator[Finding]:
    """Yield what is to be said about names, addresses and listed agents. Pure."""
    yield from _names(facts)
    yield from _advertised(facts)
    if facts.name is not None:
        yield judge_name(facts.name)
    for peer in facts.peers:
        yield judge_peer(peer)


def judge_name(name: NameFacts) -> Finding:
    """Return what is to be said about the name behind which agents are. Pure."""
    subject = "peers.dns"
    if name.problem:
        host = parse_name(name.name).host
        question = f"dig SRV {host}" if host.startswith("_") else f"getent ahosts {host}"
        mend = f"{question}; the agent asks again and again, so this may be right while no other agent runs"
        return warning(subject, f"the name {name.name} is not known here: {name.problem}", mend)
    return ok(subject, f"{name.name} leads to {', '.join(name.places)}")


def judge_peer(peer: PeerFacts) -> Finding:
    """Return what is to be said about dialling a listed agent from here. Pure."""
    subject, outcome = f"peer {peer.node}", peer.dialled
    host = parse_address(peer.address).host
    match outcome.outcome:
        case "reached":
            return ok(subject, f"{peer.address} can be dialled, {outcome.seconds * 1e3:.2f} ms")
        case "refused":
            return problem(
                subject,
                f"{peer.address} refuses connections: the machine is there, and no agent listens at this port",
                f"on {peer.node}: systemctl start allreduced; compare its peers.listen with this address",
            )
        case "silent":
            return problem(
                subject,
                f"{peer.address} says nothing ({outcome.detail}): it is off, or a firewall drops the packets",
                f"ping {host}; on {peer.node} let the port in, such as: nft add rule inet filter input tcp dport"
                f" {parse_address(peer.address).port} accept",
            )
        case "unknown":
            return problem(
                subject,
                f"the name in {peer.address} is not known here ({outcome.detail})",
                f"getent hosts {host}; add it to DNS or /etc/hosts, or give a numeric address",
            )
        case _:
            return problem(subject, f"{peer.address} cannot be dialled: {outcome.detail}", f"ip route get {host}")


def _names(facts: NetworkFacts) -> Iterator[Finding]:
    if not facts.host_addresses:
        yield warning(
            "host name",
            f"this machine does not know its own name {facts.host!r}; programs that look it up may wait for long",
            f"echo '127.0.1.1 {facts.host}' | sudo tee -a /etc/hosts",
        )
    elif all(is_loopback(address) for address in facts.host_addresses):
        yield note(
            "host name",
            f"{facts.host!r} means {facts.host_addresses[0]} here, which other machines cannot dial",
            "in peers.listen and peers.advertise, give an address that others know",
        )
    else:
        yield ok("host name", f"{facts.host!r} means {', '.join(facts.host_addresses)}")
    if facts.ipv6:
        yield ok("IPv6", "available")
    else:
        mend = "sysctl -w net.ipv6.conf.all.disable_ipv6=0, if peers have IPv6 addresses only"
        yield note("IPv6", "this machine has none: peers need IPv4 addresses", mend)


def _advertised(facts: NetworkFacts) -> Iterator[Finding]:
    subject = "address"
    remote = [peer for peer in facts.peers if not peer.local]
    if not facts.advertised:
        if remote:
            yield note(subject, "what this agent tells others is not known: no name of another one leads anywhere here")
        return
    address = parse_address(facts.advertised, any_port=True)
    if is_wildcard(address.host):
        yield problem(
            subject,
            f"{address} cannot be dialled",
            "set peers.advertise to an address of this machine (ip -br address)",
        )
    elif remote and facts.advertised_here:
        yield problem(
            subject,
            f"others are told to dial {address}, which is themselves",
            "set peers.listen, or peers.advertise, to an address that the other machines can reach",
        )
    elif remote and is_link_local(address.host):
        yield problem(
            subject,
            f"{address} means something on one link only",
            "set peers.advertise to another one (ip -br address)",
        )
    elif facts.interface is None or not facts.interface.name:
        # An agent cannot listen where this machine is not: that is told of the settings.
        if not facts.advertised_here and not _listened(facts, address):
            yield note(
                subject,
                f"others are told to dial {address}, which no interface of this machine has; that is right"
                " only behind a translation of addresses (NAT)",
                "ip -br address; else set peers.advertise to an address of this machine",
            )
    elif remote and facts.interface.bridge:
        yield problem(
            subject,
            f"others are told to dial {address}, the address of the bridge {facts.interface.name}, which is reached"
            " from containers of this machine only",
            "set peers.advertise to an address of the network between the machines (ip -br address)",
        )
    else:
        yield ok(subject, f"others are told to dial {address} on {facts.interface.name}, MTU {facts.interface.mtu}")
        if 0 < facts.interface.mtu < SMALL_MTU:
            yield warning(
                "MTU",
                f"{facts.interface.name} has an MTU of {facts.interface.mtu}: a tunnel takes much of each packet",
                f"ip link set {facts.interface.name} mtu 1500 (or 9000, where the whole network can)",
            )


def _listened(facts: NetworkFacts, address: Address) -> bool:
    """Return whether others are told the address because this agent is to listen there."""
    return bool(facts.listening) and parse_address(facts.listening, any_port=True).host == address.host


def interface_facts(numeric: str) -> Interface:
    """Return what the kernel tells about the interface that has a numeric address."""
    name = interface_of(numeric)
    place = Path("/sys/class/net") / name
    if not name or not os.access(place, os.F_OK):
        return Interface(name, 0, bridge=False)
    try:
        mtu = int((place / "mtu").read_text())
    except (OSError, ValueError):
        mtu = 0
    return Interface(name, mtu, bridge=os.access(place / "bridge", os.F_OK) or name.startswith(_BRIDGES))


async def _behind_name(settings: Settings, room: asyncio.Semaphore) -> tuple[NameFacts | None, list[PeerFacts]]:
    """Look the name up and dial what is behind it, except places of this machine: one of them is this agent's own."""
    text = settings.peers.dns
    if not text:
        return None, []
    name = parse_name(text)
    try:
        async with asyncio.timeout(FIRST_LOOKUP):
            places = await (addresses_of if name.port else places_of)(name.host, name.port)
    except NameUnknown as error:
        return NameFacts(text, (), str(error)), []
    except TimeoutError:
        return NameFacts(text, (), f"no answer for {FIRST_LOOKUP:g} s"), []
    others = [Address(name.scheme, host, port) for host, port in places if not await is_here(host)]
    peers = await asyncio.gather(*(_peer(address.host_port, address, room) for address in others[:MOST_DIALLED]))
    return NameFacts(text, tuple(Address(name.scheme, *place).host_port for place in places)), list(peers)


async def _peer(node: str, address: Address, room: asyncio.Semaphore) -> PeerFacts:
    async with room:
        found, dialled = await asyncio.gather(resolve(address.host), dial_once(str(address)))
    local = bool(found) and all(is_loopback(numeric) for numeric in found)
    return PeerFacts(node, str(address), found, local, dialled)


async def _told(settings: Settings, peers: Sequence[PeerFacts]) -> str:
    """Return the address that the agent would tell others; empty where that is not known."""
    if settings.peers.advertise:
        return str(parse_address(settings.peers.advertise, path="peers.advertise"))
    listens = listening(settings)
    if not listens:
        return ""
    where = parse_address(listens, path="peers.listen", any_port=True)
    if not is_wildcard(where.host):
        return str(where)
    remote = next((peer for peer in peers if not peer.local and peer.addresses), None)
    if remote is None:
        return ""
    return str(Address(where.scheme, await source_address(remote.addresses[0]), where.port))
