"""Which agents live, sans-IO: a failure detector that is told of links and frames and says who is lost.

``TABLE`` holds all it knows about states. Silence is the only sign with a clock: a peer is declared dead
``failure_timeout`` after it was last heard, less the time in which this agent itself did not run. Such a stall shows as
a look at the peers that comes late; it is charged to nobody.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from allreduced.core.errors import AllReducedError, PeerLost
from allreduced.daemon.membership.events import LinkLost, PeerDown, PeerUp
from allreduced.daemon.timing import Timing

Verdict: TypeAlias = "PeerUp | LinkLost | PeerDown"


class PeerState(enum.Enum):
    """What is known of one start of a peer's agent."""

    UP = "there is a link"
    CUT = "the link ended, which proves nothing; it is dialled again"
    LEAVING = "it said goodbye; the link is still open"
    SILENT = "dead, for all that is known: nothing was heard for the failure timeout"
    DEAD = "proven to be dead; forgotten"
    LEFT = "gone in order; forgotten"


class Sign(enum.Enum):
    """What happens to a peer."""

    LINKED = "a link is up, with the incarnation that is known"
    STARTED_ANEW = "a link is up, with a newer incarnation"
    ENDED = "the link ended"
    GOODBYE = "it said goodbye"
    REFUSED = "its address refuses connections"
    SILENCE = "nothing was heard for the failure timeout"


class Tell(enum.Enum):
    """What the memberships are told."""

    UP = "PeerUp"
    LINK_LOST = "LinkLost"
    LEFT = "PeerDown(goodbye)"
    SILENT = "PeerDown(silent)"
    PROVEN = "PeerDown(proven)"


@dataclass(frozen=True, slots=True)
class Step:
    """The state after a sign, and what the memberships are told, in order."""

    state: PeerState
    tells: tuple[Tell, ...] = ()


TABLE: Mapping[tuple[PeerState | None, Sign], Step] = {
    (None, Sign.LINKED): Step(PeerState.UP, (Tell.UP,)),
    # Another link took the place of the one that carried frames: what was under way may be lost.
    (PeerState.UP, Sign.LINKED): Step(PeerState.UP, (Tell.LINK_LOST, Tell.UP)),
    (PeerState.UP, Sign.STARTED_ANEW): Step(PeerState.UP, (Tell.PROVEN, Tell.UP)),
    (PeerState.UP, Sign.ENDED): Step(PeerState.CUT, (Tell.LINK_LOST,)),
    (PeerState.UP, Sign.GOODBYE): Step(PeerState.LEAVING),
    (PeerState.UP, Sign.SILENCE): Step(PeerState.SILENT, (Tell.SILENT,)),
    (PeerState.CUT, Sign.LINKED): Step(PeerState.UP, (Tell.UP,)),
    (PeerState.CUT, Sign.STARTED_ANEW): Step(PeerState.UP, (Tell.PROVEN, Tell.UP)),
    (PeerState.CUT, Sign.REFUSED): Step(PeerState.DEAD, (Tell.PROVEN,)),
    (PeerState.CUT, Sign.SILENCE): Step(PeerState.SILENT, (Tell.SILENT,)),
    (PeerState.LEAVING, Sign.STARTED_ANEW): Step(PeerState.UP, (Tell.LEFT, Tell.UP)),
    (PeerState.LEAVING, Sign.ENDED): Step(PeerState.LEFT, (Tell.LEFT,)),
    (PeerState.LEAVING, Sign.SILENCE): Step(PeerState.LEFT, (Tell.LEFT,)),
    # It was cut off, or stopped, and is back; or only now is it sure that it is dead.
    (PeerState.SILENT, Sign.LINKED): Step(PeerState.UP, (Tell.UP,)),
    (PeerState.SILENT, Sign.STARTED_ANEW): Step(PeerState.UP, (Tell.PROVEN, Tell.UP)),
    (PeerState.SILENT, Sign.REFUSED): Step(PeerState.DEAD, (Tell.PROVEN,)),
}
"""What every sign does; a sign that is not listed for a state does nothing."""

FORGOTTEN = frozenset({PeerState.DEAD, PeerState.LEFT})
"""States in which a peer is no longer known: whoever comes by its name is new."""

LINKED = frozenset({PeerState.UP, PeerState.LEAVING})
"""States in which there is a link."""


@dataclass(slots=True)
class _Peer:
    incarnation: int
    heard: float
    """Last sign of life, moved on by what is forgiven."""
    sent: float
    pace: float
    """Seconds of quiet after which it gets a heartbeat."""
    state: PeerState | None = None
    reason: AllReducedError | None = field(default=None)
    """Why its link ended."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at all peers showed. ``stall``: seconds for which this agent was held up before it; 0 if not.

    ``silent``: nodes that are declared dead now, whose links must be cut; ``verdicts`` tell so. ``heartbeats``: nodes
    to send a heartbeat to.
    """

    verdicts: tuple[Verdict, ...]
    silent: tuple[str, ...]
    heartbeats: tuple[str, ...]
    stall: float


class Liveness:
    """The failure detector of one agent. The same calls give the same verdicts, to be told to the memberships in order.

    ``now`` is monotonic time in seconds. Call :meth:`look` at :attr:`next_look`.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._peers: dict[str, _Peer] = {}
        self._next: float | None = None

    @property
    def next_look(self) -> float | None:
        """When to call :meth:`look`; None while there is nobody to look at. Only signs of links bring it forward."""
        return self._next

    @property
    def wanted(self) -> tuple[str, ...]:
        """Nodes without a link that may live: dial them, those whose link ended just now at once."""
        return tuple(node for node, peer in self._peers.items() if peer.state not in LINKED)

    def state(self, node: str) -> PeerState | None:
        """Return what is known of a node; None: nothing, or it is gone for good."""
        peer = self._peers.get(node)
        return peer.state if peer is not None else None

    def welcome(self, node: str, incarnation: int) -> bool:
        """Tell whether a link of this start of the agent may be used: not if a later start is known and not silent.

        A machine may come back with its clock set back, and its agent seem to have started earlier than before.
        """
        peer = self._peers.get(node)
        return peer is None or incarnation >= peer.incarnation or peer.state is PeerState.SILENT

    def silence(self, node: str, now: float) -> float:
        """Return for how many seconds a node has been silent, less what is forgiven; infinite for unknown nodes."""
        peer = self._peers.get(node)
        return max(0.0, now - peer.heard) if peer is not None else float("inf")

    # Signs

    def link_up(self, node: str, incarnation: int, now: float) -> tuple[Verdict, ...]:
        """Take note of a link that is used from now on. Nothing follows where it is not :meth:`welcome`."""
        if not self.welcome(node, incarnation):
            return ()
        peer = self._peers.get(node)
        anew = peer is not None and incarnation > peer.incarnation
        if peer is None:
            peer = self._peers[node] = _Peer(incarnation, now, now, self._timing.heartbeat)
        verdicts = self._take(node, peer, Sign.STARTED_ANEW if anew else Sign.LINKED, now, incarnation)
        peer.incarnation = incarnation
        peer.heard = max(peer.heard, now)
        peer.sent = now
        peer.pace = self._timing.heartbeat
        peer.reason = None
        self._look_by(now + self._timing.heartbeat)
        return verdicts

    def link_ended(self, node: str, now: float, reason: AllReducedError | None = None) -> tuple[Verdict, ...]:
        """Take note that the link in use ended, for ``reason`` where that is known."""
        peer = self._peers.get(node)
        if peer is None:
            return ()
        peer.reason = reason
        return self._take(node, peer, Sign.ENDED, now)

    def refused(self, node: str, now: float) -> tuple[Verdict, ...]:
        """Take note that the node's own address refused a connection: no agent is there."""
        peer = self._peers.get(node)
        return self._take(node, peer, Sign.REFUSED, now) if peer is not None else ()

    def goodbye(self, node: str, now: float) -> tuple[Verdict, ...]:
        """Take note of a goodbye, of either side. The peer has left once the link ends: data may be under way."""
        peer = self._peers.get(node)
        return self._take(node, peer, Sign.GOODBYE, now) if peer is not None else ()

    def heard(self, node: str, at: float) -> None:
        """Take note of a sign of life. It is enough to do so right before :meth:`look`, with the last one."""
        peer = self._peers.get(node)
        if peer is not None and at > peer.heard and peer.state in LINKED:
            peer.heard = at

    def sent(self, node: str, at: float) -> None:
        """Take note that something was sent to a node, so that no heartbeat is needed; as :meth:`heard`."""
        peer = self._peers.get(node)
        if peer is not None and at > peer.sent:
            peer.sent = at

    def keep_pace(self, node: str, heartbeat: float, now: float) -> None:
        """Take note that a peer needs a sign of life after ``heartbeat`` seconds, if that is less than here."""
        peer = self._peers.get(node)
        if peer is not None and heartbeat < peer.pace:
            peer.pace = heartbeat
            self._look_by(max(peer.sent + heartbeat, now))  # not earlier: a look that comes late means a stall

    def look(self, now: float) -> Look:
        """Look at all peers; may be called at any time."""
        timing = self._timing
        late = now - self._next if self._next is not None else 0.0
        stall = late if late > timing.tolerance else 0.0
        verdicts: list[Verdict] = []
        silent: list[str] = []
        heartbeats: list[str] = []
        for node, peer in list(self._peers.items()):
            if stall:
                # Never into the future: what came in after the stall is a sign of life as any other.
                peer.heard = max(peer.heard, min(peer.heard + stall, now))
            if peer.state is PeerState.SILENT:
                continue
            if now >= peer.heard + timing.failure_timeout:
                silent.append(node)
                verdicts += self._take(node, peer, Sign.SILENCE, now)
            elif peer.state is PeerState.UP and now >= peer.sent + peer.pace:
                peer.sent = now
                heartbeats.append(node)
        self._next = self._due(now)
        return Look(tuple(verdicts), tuple(silent), tuple(heartbeats), stall)

    def _due(self, now: float) -> float | None:
        """Return when to look next: at the latest after a heartbeat, for stalls must be noticed."""
        timing = self._timing
        watched = [peer for peer in self._peers.values() if peer.state is not PeerState.SILENT]
        due = [peer.heard + timing.failure_timeout for peer in watched]
        due += [peer.sent + peer.pace for peer in watched if peer.state is PeerState.UP]
        return min(now + timing.heartbeat, *due) if due else None

    def _look_by(self, at: float) -> None:
        self._next = at if self._next is None else min(self._next, at)

    def _take(
        self, node: str, peer: _Peer, sign: Sign, now: float, incarnation: int | None = None
    ) -> tuple[Verdict, ...]:
        step = TABLE.get((peer.state, sign))
        if step is None:
            return ()
        verdicts = tuple(self._verdict(tell, node, peer, now, incarnation) for tell in step.tells)
        peer.state = step.state
        if step.state in FORGOTTEN:
            del self._peers[node]
        return verdicts

    def _verdict(self, tell: Tell, node: str, peer: _Peer, now: float, incarnation: int | None) -> Verdict:
        match tell:
            case Tell.UP:
                return PeerUp(node, peer.incarnation if incarnation is None else incarnation)
            case Tell.LINK_LOST:
                return LinkLost(node) if peer.reason is None else LinkLost(node, peer.reason.message)
            case Tell.LEFT:
                return PeerDown(node, None, proven=True)
            case Tell.SILENT:
                return PeerDown(node, self._silent(node, peer, now), proven=False)
            case Tell.PROVEN:
                return PeerDown(node, _gone(node, peer, anew=incarnation is not None), proven=True)

    def _silent(self, node: str, peer: _Peer, now: float) -> PeerLost:
        after = f" after its link ended: {peer.reason.message}" if peer.reason is not None else ""
        return PeerLost(
            f"agent {node!r} was silent for {now - peer.heard:.1f} s{after}",
            nodes=(node,),
            hint="is its machine overloaded, off or cut off? failure_timeout is the limit",
        )


def _gone(node: str, peer: _Peer, *, anew: bool) -> PeerLost:
    how = "was started anew" if anew else "is gone: its address refuses connections"
    after = f" (its link ended: {peer.reason.message})" if peer.reason is not None else ""
    return PeerLost(f"agent {node!r} {how}{after}", nodes=(node,), hint="was it killed? see its log")
