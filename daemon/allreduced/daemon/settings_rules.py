"""What one value of the settings alone does not tell: contradictions, and addresses that are none. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from allreduced.core.addresses import Address, parse_address, parse_socket
from allreduced.core.errors import ConfigError
from allreduced.daemon.dns_discovery import parse_name
from allreduced.daemon.metrics.address import listen_address
from allreduced.daemon.metrics.hosts import host_named
from allreduced.daemon.settings import Peers, Settings
from allreduced.daemon.sizes import size_text
from allreduced.protocol.handshake import MAX_NODE_NAME
from allreduced.transports.registry import schemes

SMALLEST_TILE: Final = 256 << 10
LARGEST_TILE: Final = 4 << 20
"""Bytes of a tile. Tests of code paths for many tiles go below with the tile of a group, which is not a setting."""

LEAST_TILES: Final = 16
"""Tiles that all arenas together must have room for."""

_OTHERS_ONLY: Final = "list the other agents only"
NODE_NAMES: Final = "a name of one line, such as that of the host"
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def wrong_node_name(name: str) -> str:
    """Return what is wrong with the name of a node, in words; empty where nothing is. Pure."""
    if _CONTROL.search(name):
        return f"{name!r} has control characters"
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        return f"{name!r} is no UTF-8"
    return f"{name[:40]!r}… has {nbytes} bytes, at most {MAX_NODE_NAME} are allowed" if nbytes > MAX_NODE_NAME else ""


def check(settings: Settings, places: Mapping[str, str]) -> None:
    """Check the settings as a whole. ``places``: where each one was given (file, variable, option), for errors.

    :raises ConfigError: a value contradicts another or is malformed; ``path`` is its place.
    """
    rules = _Rules(settings, places)
    rules.node()
    rules.sizes()
    rules.times()
    rules.local_socket()
    rules.addresses()
    rules.peers()


class _Rules:
    """The rules, by what they are about; each raises ConfigError for the first value that breaks one."""

    def __init__(self, settings: Settings, places: Mapping[str, str]) -> None:
        self._settings = settings
        self._places = places

    def node(self) -> None:
        message = wrong_node_name(self._settings.agent.node)
        if message:
            raise self._wrong("agent.node", message, NODE_NAMES)

    def sizes(self) -> None:
        tile = self._settings.engine.tile_bytes
        if tile & (tile - 1) or not SMALLEST_TILE <= tile <= LARGEST_TILE:
            hint = f"a power of two from {size_text(SMALLEST_TILE)} to {size_text(LARGEST_TILE)}"
            raise self._wrong("engine.tile_bytes", f"{tile} cannot be a tile", hint)
        limits = self._settings.limits
        total = limits.arena_bytes
        if not total:
            return
        if total < LEAST_TILES * tile:
            hint = f"at least {size_text(LEAST_TILES * tile)}"
            raise self._wrong("limits.arena_bytes", f"it has no room for {LEAST_TILES} tiles", hint)
        for key, part in (("client", limits.arena_bytes_per_client), ("user", limits.arena_bytes_per_user)):
            if part > total:
                raise self._wrong(f"limits.arena_bytes_per_{key}", "it is more than arena_bytes", "at most arena_bytes")

    def times(self) -> None:
        # The one that was given is at fault; where both were, the deadline.
        given = "deadline" if "failure.deadline" in self._places else "failure_timeout"
        with self._blamed(f"failure.{given}"):
            _ = self._settings.timing
        with self._blamed(""):
            _ = self._settings.rdma_options

    def local_socket(self) -> None:
        settings = self._settings
        name = settings.agent.socket
        for key in ("socket_mode", "socket_group"):
            if name.startswith("@") and getattr(settings.access, key):
                hint = "leave it out (access.users and access.groups hold all the same), or use a path"
                raise self._wrong(f"access.{key}", f"the abstract socket {name} has no permissions", hint)
        if name:
            with self._blamed("agent.socket"):
                parse_socket(name)

    def addresses(self) -> None:
        peers, metrics = self._settings.peers, self._settings.metrics
        if peers.listen:
            self._address("peers.listen", peers.listen, any_port=True)
        if peers.advertise:
            self._address("peers.advertise", peers.advertise)
        if metrics.listen:
            with self._blamed("metrics.listen"):
                listen_address(metrics.listen)
        for at, text in enumerate(metrics.hosts):
            if host_named(text) is None:
                hint = "write a name or an address, without a port, such as metrics.example"
                raise self._wrong(f"metrics.hosts[{at}]", f"{text!r} is no name that a request can ask for", hint)
        if peers.dns:
            hint = "write name:port, such as agents:4123, or the name of a service, such as _allreduced._tcp.agents"
            with self._blamed("peers.dns", hint):
                name = parse_name(peers.dns)
            self._scheme("peers.dns", name, peers.dns, "write name:port")

    def peers(self) -> None:
        peers = self._settings.peers
        here = _own(peers)
        names: set[str] = set()
        addresses: dict[str, str] = {}
        for at, peer in enumerate(peers.static):
            of_node, of_address = f"peers.static[{at}].node", f"peers.static[{at}].address"
            self._address(of_address, peer.address)
            message = wrong_node_name(peer.node)
            if message:
                raise self._wrong(of_node, message, NODE_NAMES)
            if peer.node in names:
                raise self._wrong(of_node, f"{peer.node!r} is listed twice", "node names are unique")
            if peer.node == self._settings.agent.node:
                raise self._wrong(of_node, f"{peer.node!r} is this agent itself (agent.node)", _OTHERS_ONLY)
            address = _canonical(peer.address)
            if address in addresses:
                message = f"{address} is listed twice, for {addresses[address]!r} and {peer.node!r}"
                raise self._wrong(of_address, message, "each agent has an address of its own")
            if address in here:
                raise self._wrong(of_address, f"{address} is where this agent itself listens", _OTHERS_ONLY)
            names.add(peer.node)
            addresses[address] = peer.node

    def _address(self, key: str, text: str, *, any_port: bool = False) -> None:
        if text.startswith("inproc://"):
            return
        with self._blamed(key):
            address = parse_address(text, any_port=any_port)
        self._scheme(key, address, text, "write tcp://host:port")

    def _scheme(self, key: str, address: Address, text: str, hint: str) -> None:
        if address.scheme not in schemes():
            raise self._wrong(key, f"there is no transport {address.scheme!r} ({text})", hint)

    @contextmanager
    def _blamed(self, key: str, hint: str = "") -> Iterator[None]:
        """Let an error name the place of ``key``, or of the key that it names itself where that is empty."""
        try:
            yield
        except ConfigError as error:
            raise self._wrong(key or error.path, error.message, hint or error.hint) from error

    def _wrong(self, key: str, message: str, hint: str) -> ConfigError:
        setting, bracket, rest = key.partition("[")
        where = self._places.get(setting, setting) + bracket + rest
        return ConfigError(f"{where}: {message}", path=where, hint=hint)


def _own(peers: Peers) -> frozenset[str]:
    """Return the addresses at which this agent is, as far as the settings tell."""
    return frozenset(_canonical(text) for text in (peers.listen, peers.advertise) if text)


def _canonical(address: str) -> str:
    return address if address.startswith("inproc://") else str(parse_address(address, any_port=True))
