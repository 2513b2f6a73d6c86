"""What went over the links to each peer, links that are over included, and how often they broke."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from allreduced.daemon.carrier import carrier
from allreduced.transports.base import Link, LinkStats

MAX_PEERS = 1024
"""Peers that are remembered; of those without a link the one whose last link ended first is forgotten."""


@dataclass(slots=True)
class PeerTraffic:
    """All links to one peer. ``resets``: links that ended without a goodbye; ``losses``: how often it was lost."""

    resets: int = 0
    losses: int = 0


class Traffic:
    """Adds up. ``Link.stats`` count since a link was made; here the sums of links that are over are kept."""

    def __init__(self) -> None:
        self._peers: dict[str, PeerTraffic] = {}
        self._over: dict[tuple[str, str], LinkStats] = {}

    @property
    def peers(self) -> dict[str, PeerTraffic]:
        """By node, what happened to the links to it."""
        return dict(self._peers)

    def ended(self, link: Link, *, orderly: bool) -> None:
        """Take over the numbers of a link that is over."""
        key = _key(link)
        total = self._over.setdefault(key, LinkStats())
        _add(total, link.stats)
        self._peer(link.peer.node).resets += not orderly

    def lost(self, node: str) -> None:
        """Take note that a peer was declared dead."""
        self._peer(node).losses += 1

    def read(self, live: Iterable[Link]) -> dict[tuple[str, str], LinkStats]:
        """Return the sums by node and transport. ``live``: all links that are not over."""
        sums = {key: _copy(stats) for key, stats in self._over.items()}
        for link in live:
            _add(sums.setdefault(_key(link), LinkStats()), link.stats)
        return sums

    def _peer(self, node: str) -> PeerTraffic:
        peer = self._peers.pop(node, None) or PeerTraffic()
        self._peers[node] = peer
        if len(self._peers) > MAX_PEERS:
            oldest = next(iter(self._peers))
            del self._peers[oldest]
            for key in [key for key in self._over if key[0] == oldest]:
                del self._over[key]
        return peer


def _key(link: Link) -> tuple[str, str]:
    return link.peer.node, carrier(link)[0]


def _copy(stats: LinkStats) -> LinkStats:
    copied = LinkStats()
    _add(copied, stats)
    return copied


def _add(total: LinkStats, stats: LinkStats) -> None:
    for field in fields(LinkStats):
        setattr(total, field.name, getattr(total, field.name) + getattr(stats, field.name))
