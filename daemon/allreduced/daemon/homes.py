"""At which addresses a refused connection proves that an agent is dead, as a pure decision."""

from __future__ import annotations

from dataclasses import dataclass

from allreduced.daemon.reachability import same_host
from allreduced.protocol.peer import MAX_PEERS


@dataclass(slots=True)
class _Refusal:
    """An address that refused while its agent had a link, and when."""

    node: str
    at: float


class Homes:
    """The addresses that surely are an agent's own, so that nobody listens there only if that agent is dead.

    An address is a home where a link led to it, or where its agent tells it and is on that host. It is none any more
    once it refused while its agent lived: a firewall lets nobody through, whatever happens to the agent.
    """

    def __init__(self) -> None:
        self._homes: dict[str, str] = {}
        self._refused: dict[str, _Refusal] = {}
        """By address: those of agents that had a link then. Whether they lived is not known yet."""
        self._shut: dict[str, str] = {}
        """Address to node: those that refuse though their agents live."""

    def led_to(self, address: str, node: str) -> None:
        """Take note that a link was made by dialling ``address``, and who was there."""
        self._homes[address] = node
        self._shut.pop(address, None)
        self._refused.pop(address, None)

    def told(self, address: str, node: str, remote: str) -> bool:
        """Take note of the address that a peer tells; its link comes from ``remote``. True where it is a home now.

        On the same host, who answers there is surely the peer. Behind a translation of addresses it may be anybody.
        """
        home = same_host(address, remote) and self._shut.get(address) != node
        if home:
            self._homes[address] = node
        return home

    def home_of(self, address: str) -> str | None:
        """Return whose home ``address`` is; None: nobody's."""
        return self._homes.get(address)

    def refused_while_up(self, address: str, now: float) -> None:
        """Take note that a home refused a connection while there was a link to its agent, which may be ending."""
        node = self._homes.get(address)
        if node is not None:
            self._refused.setdefault(address, _Refusal(node, now))

    def heard(self, node: str, at: float) -> tuple[str, ...]:
        """Take note that an agent sent something at ``at``; return its addresses that are no homes for that."""
        shut = tuple(address for address, refusal in self._refused.items() if refusal.node == node and at > refusal.at)
        for address in shut:
            del self._refused[address]
            if self._homes.get(address) == node:
                del self._homes[address]
            self._shut[address] = node
            if len(self._shut) > MAX_PEERS:
                del self._shut[next(iter(self._shut))]
        return shut

    def forget(self, node: str) -> None:
        """Take note that an agent is gone for good; another start of it may be reached where it could not be."""
        self._homes = {address: other for address, other in self._homes.items() if other != node}
        self._refused = {address: refusal for address, refusal in self._refused.items() if refusal.node != node}
        self._shut = {address: other for address, other in self._shut.items() if other != node}
