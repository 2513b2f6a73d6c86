"""Looks at the links in use when it is time: who is silent, who needs a heartbeat, whom the engine may count on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from allreduced.daemon.engine.events import Heard
from allreduced.daemon.lazy_timer import LazyTimer
from allreduced.daemon.membership.liveness import Liveness, Look
from allreduced.daemon.peer_link import PeerLink
from allreduced.daemon.ports import EventSink
from allreduced.daemon.timing import Timing
from allreduced.protocol.peer import Heartbeat

logger = logging.getLogger("allreduced.peers")


class LinkWatch:
    """Gives the failure detector its clock and its signs of life.

    ``links``: those in use, by node; kept by the owner. ``looked`` is told what each look showed, and acts on it.
    A look that is due waits until the loop has read what came in: after this process was stopped, nobody is judged
    before.
    """

    def __init__(
        self,
        liveness: Liveness,
        timing: Timing,
        sink: EventSink,
        links: Mapping[str, PeerLink],
        looked: Callable[[Look, float], None],
    ) -> None:
        self._liveness = liveness
        self._timing = timing
        self._sink = sink
        self._links = links
        self._looked = looked
        self._timer = LazyTimer(sink.now, self._due)
        self._told: dict[str, float] = {}
        """When each node was heard, as the engine knows it."""
        self._tell_at = float("-inf")
        self._started = False
        self._waiting: asyncio.Handle | None = None

    def start(self) -> None:
        """Begin to watch, on the running loop."""
        self._started = True
        self.schedule()

    def close(self) -> None:
        """Look at nothing any more."""
        self._started = False
        self._timer.close()
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def schedule(self) -> None:
        """Take note that a link is used or over: the next look may be another one."""
        at = self._liveness.next_look
        if self._started:
            self._timer.set(at if at is None or not self._links else min(at, max(self._tell_at, self._sink.now())))

    def note(self, node: str) -> None:
        """Bring the failure detector up to date about one node."""
        link = self._links.get(node)
        if link is not None:
            self._liveness.heard(node, link.link.last_received)
            self._liveness.sent(node, link.last_sent)

    def look(self) -> None:
        """Look at all links now."""
        self._waiting = None
        for node in self._links:
            self.note(node)
        now = self._sink.now()
        look = self._liveness.look(now)
        if look.stall > self._timing.failure_timeout / 4:
            logger.warning("event=held_up seconds=%.2f", look.stall)
        self._looked(look, now)
        for node in look.heartbeats:
            link = self._links.get(node)
            if link is not None:
                link.send(Heartbeat())
        if now >= self._tell_at:
            self._tell(now)
        self.schedule()

    def _due(self) -> None:
        # A turn of the loop reads the sockets after it has called what waited, so the second turn knows what they had.
        loop = asyncio.get_running_loop()
        self._waiting = loop.call_soon(self._read_first)

    def _read_first(self) -> None:
        self._waiting = asyncio.get_running_loop().call_soon(self.look)

    def _tell(self, now: float) -> None:
        """Tell the engine in one event whom it may count on."""
        self._tell_at = now + self._timing.heartbeat
        last = {node: link.link.last_received for node, link in self._links.items()}
        nodes = tuple(node for node, at in sorted(last.items()) if at > self._told.get(node, float("-inf")))
        self._told = last
        if nodes:
            self._sink.engine_event(Heard(nodes))
