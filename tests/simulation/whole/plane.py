"""The peer plane of a simulated agent: dials, keeps one connection per peer, and asks the failure detector.

What ``daemon/peers.py`` does with tasks and sockets, without both. The detector is the real one.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tests.simulation.whole.process import Process
from tests.simulation.whole.wire import End, Wire

from allreduced.daemon.membership.liveness import Liveness, Verdict
from allreduced.daemon.timing import Timing
from allreduced.protocol.peer import Frame, Goodbye, Heartbeat, PeerTable


class Sink(Protocol):
    """The driver of the agent, as its peer plane sees it."""

    def verdict(self, verdict: Verdict) -> None:
        """Take what the failure detector says."""

    def heard(self, nodes: tuple[str, ...]) -> None:
        """Take note of peers that gave a sign of life since they were told last."""

    def frame(self, node: str, frame: Frame) -> None:
        """Take a frame for the pure parts."""

    def echo(self, node: str, frame: Frame) -> None:
        """Take a frame once more that came over a link before."""

    def data(self, end: End, token: bytes, offset: int, data: bytes, tag: int) -> None:
        """Take a piece of data."""

    def closed(self, end: End) -> None:
        """Take back what a connection still has."""


@dataclass(slots=True, eq=False)
class _Link:
    end: End
    heard: float
    sent: float
    chosen: bool = False


@dataclass(slots=True, eq=False)
class _Dialling:
    """One target: ``under_way`` counts tries, so that a late answer is told from a current one."""

    pause: float
    under_way: int = 0
    busy: bool = False


class Plane:
    """All links of one start of an agent."""

    def __init__(
        self, node: str, incarnation: int, process: Process, wire: Wire, rng: random.Random, timing: Timing, sink: Sink
    ) -> None:
        self.node = node
        self.incarnation = incarnation
        self.process = process
        self.liveness = Liveness(timing)
        self._wire = wire
        self._rng = rng
        self._timing = timing
        self._sink = sink
        self._links: dict[End, _Link] = {}
        self._up: dict[str, _Link] = {}
        self._targets: dict[str, _Dialling] = {}
        self._look_at: float | None = None
        self._tell_at = 0.0
        self._told: dict[str, float] = {}
        self.closing = False
        self.echoes = False
        """Frames of a link that was reset come once more over the next one."""
        self._recent: dict[tuple[str, int], deque[Frame]] = {}

    def start(self, targets: Iterable[str]) -> None:
        """Dial these from now on."""
        for target in targets:
            self._targets[target] = _Dialling(self._timing.first_pause)
            self.process.after(self._rng.random() * 1e-3, "dial", partial(self._dial, target))

    # What the driver needs

    def send_frame(self, node: str, frame: Frame) -> None:
        """Send a control frame; dropped where there is no link, and behind a goodbye."""
        link = self._up.get(node)
        if link is not None and not self.closing:
            link.sent = self.process.now()
            link.end.send(frame)

    def link(self, node: str) -> End | None:
        """Return the connection to the node, for data."""
        link = self._up.get(node)
        return link.end if link is not None and not self.closing else None

    def close(self) -> None:
        """Say goodbye to everybody."""
        self.closing = True
        for node, link in list(self._up.items()):
            link.end.send(Goodbye("the agent stops"))
            self._verdicts(self.liveness.goodbye(node, self.process.now()))

    # What the wire tells

    def established(self, end: End) -> None:
        """Choose a connection, refuse it, or wait for the other side to choose: that with the lower name does."""
        now = self.process.now()
        link = self._links[end] = _Link(end, now, now)
        self._answered(end.node)
        known = self._up.get(end.node)
        if self.closing or not self.liveness.welcome(end.node, end.incarnation):
            self._refuse(link)
        elif self.node < end.node:
            if known is not None and known.end.incarnation == end.incarnation:
                self._refuse(link)
            else:
                self._choose(link)
        else:
            self.process.after(self._timing.failure_timeout, end, partial(self._unused, link))

    def frame_came(self, end: End, frame: Frame) -> None:
        """Take a control frame."""
        link = self._links.get(end)
        if link is None:
            return
        link.heard = self.process.now()
        if not link.chosen:
            if self.closing:
                return
            self._choose(link)
        match frame:
            case Goodbye():
                self._verdicts(self.liveness.goodbye(end.node, self.process.now()))
                if not self.closing:
                    self.process.after(self._rng.random() * 1e-3, end, end.abort)
            case PeerTable() | Heartbeat():
                pass
            case _:
                if self.echoes:
                    self._recent.setdefault((end.node, end.incarnation), deque(maxlen=16)).append(frame)
                self._sink.frame(end.node, frame)

    def data_came(self, end: End, token: bytes, offset: int, data: bytes, tag: int) -> None:
        """Take a piece of data."""
        link = self._links.get(end)
        if link is not None:
            link.heard = self.process.now()
        self._sink.data(end, token, offset, data, tag)

    def end_closed(self, end: End) -> None:
        """Take note that a connection is over."""
        link = self._links.pop(end, None)
        if link is not None and self._up.get(end.node) is link:
            del self._up[end.node]
            self._verdicts(self.liveness.link_ended(end.node, self.process.now()))
            self._dial_now(end.node)
        self._sink.closed(end)

    # Links

    def _choose(self, link: _Link) -> None:
        node, now = link.end.node, self.process.now()
        known = self._up.get(node)
        link.chosen = True
        self._up[node] = link
        if known is not None:
            # The link that carried frames is not used any more; its memory comes back when it is over.
            del self._links[known.end]
            known.end.abort()
        link.sent = now
        link.end.send(PeerTable(()))
        self._verdicts(self.liveness.link_up(node, link.end.incarnation, now))
        for frame in self._recent.pop((node, link.end.incarnation), ()):
            if self._rng.random() < 0.5:
                wait = self._rng.random() ** 3 * self._timing.failure_timeout
                self.process.after(wait, "echo", partial(self._echo, link.end, frame))
        self._arm()

    def _echo(self, end: End, frame: Frame) -> None:
        link = self._up.get(end.node)
        if link is not None and link.end.incarnation == end.incarnation:
            self._sink.echo(end.node, frame)

    def _refuse(self, link: _Link) -> None:
        self._links.pop(link.end, None)
        link.end.abort()

    def _unused(self, link: _Link) -> None:
        if not link.chosen:
            self._refuse(link)

    def _verdicts(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self._sink.verdict(verdict)

    # Dialling

    def _dial_now(self, node: str) -> None:
        dialling = self._targets.get(node)
        if dialling is not None:
            dialling.pause = self._timing.first_pause
            if not dialling.busy:
                self._dial(node)

    def _dial(self, node: str) -> None:
        dialling = self._targets[node]
        if dialling.busy or node in self._up or self.closing:
            return
        dialling.busy = True
        dialling.under_way += 1
        attempt = dialling.under_way

        def refused() -> None:
            if attempt == dialling.under_way:
                self._answered(node)
                self._verdicts(self.liveness.refused(node, self.process.now()))

        def silent() -> None:
            if attempt == dialling.under_way:
                self._answered(node)

        self._wire.dial(self, node, refused)
        self.process.after(self._timing.connect, "dial", silent)

    def _answered(self, node: str) -> None:
        """Take note that a try is over; the next one follows if there is no link by then."""
        dialling = self._targets.get(node)
        if dialling is None:
            return
        dialling.under_way += 1
        dialling.busy = False
        pause = dialling.pause
        dialling.pause = min(2 * pause, self._timing.longest_pause)
        self.process.after(pause, "dial", partial(self._dial, node))

    # Signs of life

    def _arm(self) -> None:
        due = self.liveness.next_look
        if due is not None and self._up:
            due = min(due, max(self._tell_at, self.process.now()))
        if due is None or (self._look_at is not None and self._look_at <= due):
            return
        self._look_at = due
        self.process.at(due, "look", partial(self._look, due))

    def _look(self, planned: float) -> None:
        # What came in meanwhile is looked at first, as sockets are.
        if self._look_at == planned:
            self.process.after(0.0, "look", self._look_now)

    def _look_now(self) -> None:
        self._look_at = None
        now = self.process.now()
        for node, link in self._up.items():
            self.liveness.heard(node, link.heard)
            self.liveness.sent(node, link.sent)
        look = self.liveness.look(now)
        for node in look.silent:
            if node in self._up:
                self._refuse(self._up.pop(node))
            self._dial_now(node)
        for node in look.heartbeats:
            self.send_frame(node, Heartbeat())
        self._verdicts(look.verdicts)
        if now >= self._tell_at:
            self._tell(now)
        self._arm()

    def _tell(self, now: float) -> None:
        self._tell_at = now + self._timing.heartbeat
        last = {node: link.heard for node, link in self._up.items()}
        nodes = tuple(node for node, at in sorted(last.items()) if at > self._told.get(node, float("-inf")))
        self._told = last
        if nodes:
            self._sink.heard(nodes)
