"""The sends of a link that are under way, and how each of their frames goes: written into place, or in messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from allreduced.transports.outbox import Outgoing, OutgoingFrame
from allreduced.transports.rdma import wire
from allreduced.transports.rdma.revocations import Revocations
from allreduced.transports.rdma.sender import Way
from allreduced.transports.rdma.sources import Source, Sources
from allreduced.transports.rdma.verbs_port import Region


@dataclass(slots=True)
class _Departure:
    """Where a send goes, and its memory once that is registered."""

    token: wire.Token
    outgoing: Outgoing
    source: Source | None = None
    unregistrable: bool = False
    stopping: bool = False
    """It was cancelled, and the device still reads frames of it."""


class Departures:
    """Those of one link. ``small``: bytes that rather go in a message. ``tag``: stands in all tokens of the peer."""

    def __init__(self, sources: Sources, revocations: Revocations, *, small: int, tag: int) -> None:
        self._sources = sources
        self._revocations = revocations
        self._small = small
        self._tag = tag
        self._departures: dict[int, _Departure] = {}

    def begin(self, outgoing: Outgoing, token: wire.Token) -> None:
        """Take note of a send that was queued."""
        self._departures[outgoing.send] = _Departure(token, outgoing)

    def way_of(self, frame: OutgoingFrame) -> Way:
        """Decide how a frame goes; one that is written is counted as under way from now on."""
        outgoing = frame.outgoing
        if outgoing is None:
            return Way(skip=True)
        departure = self._departures[outgoing.send]
        token = departure.token
        if token.link != self._tag or token.serial in self._revocations:
            return Way(skip=True)
        # A frame beyond the receive goes in messages too: the other end can tell then what is wrong with it.
        if frame.length <= self._small or not token.key or frame.offset + frame.length > token.size:
            return Way()
        source = self._source(departure)
        if source is None:
            return Way()
        self._revocations.begin_write(token.serial)
        return Way(
            local_key=source.region.local_key,
            remote_key=token.key,
            remote_address=token.address + frame.offset,
            send=outgoing.send,
            end=outgoing.offset + outgoing.view.nbytes,
        )

    def stop(self, send: int) -> None:
        """Take note that a send was cancelled whose frames are on their way; they arrive whole."""
        self._departures[send].stopping = True

    def is_stopping(self, send: int) -> bool:
        """Tell whether a cancelled send is still read."""
        departure = self._departures.get(send)
        return departure is not None and departure.stopping

    def stopping(self) -> Iterator[Outgoing]:
        """Yield the cancelled sends that are still read."""
        return (departure.outgoing for departure in self._departures.values() if departure.stopping)

    def end(self, send: int) -> Region | None:
        """Forget a send that is over; return the region that was registered for it alone."""
        departure = self._departures.pop(send, None)
        if departure is None or departure.source is None or not departure.source.own:
            return None
        return departure.source.region

    def clear(self) -> None:
        """Forget all; the link is over."""
        self._departures.clear()

    def _source(self, departure: _Departure) -> Source | None:
        """Return the registration of its memory, made with its first frame; None where it cannot be registered."""
        if departure.source is None and not departure.unregistrable:
            departure.source = self._sources.find(departure.outgoing.view)
            departure.unregistrable = departure.source is None
        return departure.source
