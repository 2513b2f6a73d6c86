"""How an agent finds the first other agents: a list, a meeting point, or a name. Whom these know it hears from them.

``discovery_port`` has the contract; a further way, such as a coordination service, is one more class and one more line
in :func:`discovery`.
"""

from __future__ import annotations

import errno
from dataclasses import replace

from allreduced.core.addresses import Address, is_wildcard, parse_address
from allreduced.core.errors import AuthenticationError, ConfigError
from allreduced.daemon.discovery_port import Changed, Discovery, Found, Listen
from allreduced.daemon.dns_discovery import Dns, everywhere_behind, parse_name
from allreduced.daemon.peer_link import Target
from allreduced.daemon.reachability import everywhere, known_as_loopback, source_address
from allreduced.daemon.settings import DEFAULT_PORT, Settings


class Static:
    """The agents are listed. Without an address to listen at this agent is alone."""

    def __init__(self, listen: str, targets: tuple[Target, ...]) -> None:
        self._listen = listen
        self._targets = targets

    async def find(self, listen: Listen) -> Found:
        """Listen where the settings say. See Discovery."""
        return Found(await listen(self._listen) if self._listen else None, self._targets)

    async def follow(self, advertised: str, changed: Changed) -> None:
        """Return: a list does not change. See Discovery."""


class Rendezvous:
    """The agents meet at one address. Whoever can listen there is found by the others; nobody is special later.

    ``listen``: where this agent must listen instead, then it only dials; empty where it may be the one to be found.
    Where this machine knows the name of the meeting point as its own loopback, agents on other machines know it
    otherwise: then this agent listens on all interfaces, which takes a secret.
    """

    def __init__(self, meeting: str, listen: str = "") -> None:
        self._meeting = parse_address(meeting, path="join")
        self._listen = listen
        if is_wildcard(self._meeting.host):
            raise ConfigError(f"{self._meeting} cannot be dialled", path="join", hint="give the address of one node")

    async def find(self, listen: Listen) -> Found:
        """Try to listen at the meeting point; if it is taken or elsewhere, dial it. See Discovery."""
        target = Target(str(self._meeting))
        if self._listen:
            return Found(await listen(self._listen), (target,))
        closed = await known_as_loopback(self._meeting.host)
        meeting = replace(self._meeting, host=everywhere()) if closed else self._meeting
        try:
            return Found(await listen(str(meeting)), ())
        except AuthenticationError as error:
            if closed:
                raise self._closed(error) from error
            raise
        except ConfigError as error:
            reason = error.__cause__.errno if isinstance(error.__cause__, OSError) else None
            if reason not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
        own = meeting.host if closed else await source_address(meeting.host)
        if reason == errno.EADDRINUSE:
            return Found(await listen(str(replace(meeting, host=own, port=0))), (target,), str(meeting))
        # On another machine than the meeting point: the same port, so that firewalls need one rule.
        try:
            return Found(await listen(str(replace(meeting, host=own))), (target,))
        except ConfigError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                raise
        return Found(await listen(str(replace(meeting, host=own, port=0))), (target,))

    async def follow(self, advertised: str, changed: Changed) -> None:
        """Return: those who have met tell each other. See Discovery."""

    def _closed(self, error: AuthenticationError) -> AuthenticationError:
        return AuthenticationError(
            f"the agents of this job are to meet at {self._meeting.host_port}, which this machine knows as its own "
            "loopback (see /etc/hosts): agents on other machines cannot reach it there, and there is no shared secret "
            "to listen on all interfaces with",
            hint=f"{error.hint}; or let the agents meet at 127.0.0.1 where all are on this machine",
        )


def discovery(settings: Settings, join: str) -> Discovery:
    """Return how an agent with these settings finds others; ``join`` is the meeting point, or empty.

    :raises ConfigError: the address is malformed.
    """
    if join:
        return Rendezvous(join, settings.peers.listen)
    peers = settings.peers
    static = listed(settings)
    if peers.dns:
        return Dns(peers.dns, listen=listening(settings), static=static, interval=peers.dns_interval)
    return Static(listening(settings), static)


def listening(settings: Settings) -> str:
    """Return where an agent with these settings listens, where it joins nobody; empty: nowhere, it is alone.

    On all interfaces where they name others and not where to listen, at the port of the name behind which those are.

    :raises ConfigError: the name is malformed.
    """
    peers = settings.peers
    if peers.listen:
        return peers.listen
    if peers.dns:
        return everywhere_behind(parse_name(peers.dns))
    return str(Address("tcp", everywhere(), DEFAULT_PORT)) if peers.static else ""


def listed(settings: Settings) -> tuple[Target, ...]:
    """Return the agents of the static list, to dial."""
    return tuple(Target(peer.address, peer.node) for peer in settings.peers.static)
