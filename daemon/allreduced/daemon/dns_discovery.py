"""The agents are behind a name: its addresses (A, AAAA) or, for a service (SRV), its places, looked up for ever.

This is how headless services of Kubernetes and the network aliases of Docker tell who there is. Node names are not in
DNS: links learn them in their handshake. An address that is not listed any more is dialled no more once its link has
ended; the link itself stays, for what DNS says is late and says nothing about who lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from allreduced.core.addresses import Address, is_wildcard, parse_address
from allreduced.core.errors import ConfigError
from allreduced.daemon.discovery_port import Changed, Found, Listen, Listing
from allreduced.daemon.names import Lookup, NameUnknown, Places, addresses_of, places_of
from allreduced.daemon.peer_link import Target
from allreduced.daemon.reachability import everywhere, source_address
from allreduced.daemon.settings import DEFAULT_PORT
from allreduced.protocol.peer import MAX_PEERS

logger = logging.getLogger("allreduced.peers")

Here: TypeAlias = "Callable[[str], Awaitable[bool]]"
"""Tells whether a numeric address is one of this machine, or container."""

FIRST_LOOKUP = 5.0
"""Seconds that the start of an agent waits for the first answer."""

FIRST_PAUSE = 1.0
"""Seconds between lookups as long as there is no answer; they double up to the interval."""


async def is_here(host: str) -> bool:
    """Return whether ``host`` is an address of this machine: the way to it starts where it ends."""
    try:
        return await source_address(host) == host
    except ConfigError:
        return False


def parse_name(text: str, *, path: str = "peers.dns") -> Address:
    """Return the name, with port 0 for a service: ``agents:4123`` or ``_allreduced._tcp.agents``.

    :raises ConfigError: it is malformed.
    """
    scheme, _, rest = text.rpartition("://")
    if rest.startswith("_") and ":" not in rest:
        return replace(parse_address(f"{rest}:0", scheme=scheme or "tcp", path=path, any_port=True), port=0)
    return parse_address(text, path=path)


def everywhere_behind(name: Address) -> str:
    """Return the address of all interfaces at the port of a name, for an agent that is one of those behind it."""
    return str(Address(name.scheme, everywhere(), name.port or DEFAULT_PORT))


def listing(scheme: str, places: Places, own: Sequence[tuple[str, int]], *, limit: int = MAX_PEERS) -> Listing:
    """Return whom to dial when a name leads to ``places``, some of which are this agent's ``own``."""
    addresses = [Address(scheme, host, port) for host, port in places if not is_wildcard(host) and port]
    mine = [address for address in addresses if (address.host, address.port) in own]
    others = sorted(str(address) for address in addresses if address not in mine)
    return Listing(
        targets=frozenset(Target(address) for address in others[:limit]),
        own=str(mine[0]) if mine else "",
        problem=f"only {limit} of {len(others)} addresses are dialled" if len(others) > limit else "",
    )


class Dns:
    """Finds agents by a name. See the module.

    ``listen``: where this agent listens; empty: on all interfaces, at the port of the name. ``static``: agents that are
    listed besides. ``interval``: seconds between lookups.
    """

    def __init__(
        self,
        name: str,
        *,
        listen: str = "",
        static: tuple[Target, ...] = (),
        interval: float = 10.0,
        lookup: Lookup | None = None,
        here: Here = is_here,
    ) -> None:
        self._name = parse_name(name)
        self._listen = listen or everywhere_behind(self._name)
        self._static = static
        self._interval = interval
        self._lookup = lookup or (addresses_of if self._name.port else places_of)
        self._here = here
        self._where: Address | None = None
        self._asking: asyncio.Future[Places] | None = None
        self._listing = Listing()
        self._known = False

    async def find(self, listen: Listen) -> Found:
        """Listen, and look the name up once. See Discovery."""
        listener = await listen(self._listen)
        self._where = parse_address(listener.address)
        await self._look(FIRST_LOOKUP)
        return Found(listener, self._static, listing=self._listing)

    async def follow(self, advertised: str, changed: Changed) -> None:
        """Look the name up again and again. See Discovery."""
        pause = min(FIRST_PAUSE, self._interval)
        try:
            while True:
                await asyncio.sleep(self._interval if self._known else pause)
                pause = min(2 * pause, self._interval)
                before = self._listing
                await self._look(self._interval)
                if self._listing != before:
                    changed(self._listing)
        finally:
            if self._asking is not None:
                self._asking.cancel()

    async def _look(self, seconds: float) -> None:
        """Ask, wait ``seconds`` for an answer, and keep what is new. A question that is open is not asked again."""
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._lookup(self._name.host, self._name.port))
        done, _ = await asyncio.wait([self._asking], timeout=seconds)
        if not done:
            self._unknown(f"no answer for {seconds:g} s")
            return
        asked, self._asking = self._asking, None
        try:
            places = asked.result()
        except NameUnknown as error:
            self._unknown(str(error))
            return
        new = listing(self._name.scheme, places, [place for place in places if await self._mine(*place)])
        if not self._known or new != self._listing:
            logger.info("event=name_known name=%s others=%d own=%s", self._text, len(new.targets), new.own or "-")
            if new.problem:
                logger.warning("event=too_many_peers name=%s problem=%r", self._text, new.problem)
        self._known = True
        self._listing = new

    def _unknown(self, reason: str) -> None:
        """Keep whom this agent dials: that a name is not known may mean that nobody could be asked."""
        problem = f"the name {self._text} is not known: {reason}"
        if self._listing.problem != problem:
            logger.warning("event=name_unknown name=%s reason=%r", self._text, reason)
        self._known = False
        self._listing = replace(self._listing, problem=problem)

    async def _mine(self, host: str, port: int) -> bool:
        where = self._where
        if where is None or port != where.port:
            return False
        return await self._here(host) if is_wildcard(where.host) else host == where.host

    @property
    def _text(self) -> str:
        return self._name.host_port if self._name.port else self._name.host
