"""The peer plane: which agents are reachable, over which link, and what the failure detector is told of them.

Either side dials. Of the links between two agents the one with the lower name chooses one, by using it first; the
other waits for that before it uses a link. So exactly one link carries frames and nothing is lost in between.

A link that ends proves nothing: it is dialled again at once, by whoever knows an address. That a peer is dead is proven
by a refused connection at an address that is surely its own, or by a later start of it. A second link of a peer whose
first one seems to work is a contest: if anything is still heard over the first one, it stays. So a connection that only
one side has lost is replaced, and an agent that bears the name of another one does not push it out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from allreduced.core.errors import (
    AgentUnavailable,
    AllReducedError,
    AuthenticationError,
    ConfigError,
    LimitExceeded,
)
from allreduced.core.log_limit import LogLimit
from allreduced.core.refusals import Kind, Plane, refused
from allreduced.daemon.carrier import carrier
from allreduced.daemon.dialler import Dialler
from allreduced.daemon.diallers import Diallers
from allreduced.daemon.discovery_port import Listing
from allreduced.daemon.link_watch import LinkWatch
from allreduced.daemon.membership.events import LinkLost, PeerDown, PeerUp
from allreduced.daemon.membership.liveness import Liveness, Look, Verdict
from allreduced.daemon.peer_link import LinkOwner, LinkSink, LinkState, PeerLink, Target
from allreduced.daemon.ports import ReachablePeer
from allreduced.daemon.timing import Timing, heartbeat
from allreduced.daemon.traffic import Traffic
from allreduced.protocol.peer import MAX_PEERS, Frame, Goodbye, Heartbeat, LoadFrame, PeerTable, StatusFrame
from allreduced.transports.base import Link, LinkEvents, LinkOptions, Listener, Transport, is_refusal
from allreduced.transports.registry import scheme_of

logger = logging.getLogger("allreduced.peers")

STOPS = "the agent stops"
"""The reason of an ordinary goodbye."""

LONGEST_FAREWELL = 1.0
"""Seconds in which an agent that is turned away must have read why."""

OWN_NAMES = "is the name used twice? give each agent its own (agent.node), or end the other one first"
"""What to do about two agents of one name."""

MAX_LOST = 256
"""Lost agents that are remembered, for ``status``."""

LOST_SHOWN = 3600.0
"""Seconds for which they are."""


class Peers(LinkOwner):
    """Implements ``PeerPort``. Use it on one loop: listen, :meth:`start`, add whom to dial, in the end :meth:`close`.

    ``transport``: finds a transport by its scheme. ``rdma_expected``: a link whose data goes by TCP is worth a warning.
    """

    def __init__(
        self,
        node: str,
        incarnation: int,
        sink: LinkSink,
        options: LinkOptions,
        transport: Callable[[str], Transport],
        *,
        timing: Timing,
        most: int = MAX_PEERS,
        rdma_expected: bool = False,
    ) -> None:
        """``most``: agents that there are links to at the same time (``limits.peers``)."""
        self.sink = sink
        self.on_status: Callable[[str, StatusFrame], None] | None = None
        self.on_load: Callable[[str, LoadFrame], None] | None = None
        """Called with what the agent of a node asks about this one, or answers; set before links are made."""
        self._node = node
        self._incarnation = incarnation
        self._options = options
        self._transport = transport
        self._timing = timing
        self._most = most
        self._rdma_expected = rdma_expected
        self._log = LogLimit(logger)
        self._up: dict[str, PeerLink] = {}
        self._liveness = Liveness(timing)
        self._watch = LinkWatch(self._liveness, timing, sink, self._up, self._looked)
        self.traffic = Traffic()
        self._lost: dict[str, tuple[float, str]] = {}
        """By node: since when there is no link to it any more, and why."""
        self._links: set[PeerLink] = set()
        self._diallers = Diallers(node, timing, self._connect, self._up.get)
        self._tasks: set[asyncio.Task[None]] = set()
        self._advertised = ""
        self._problem = ""
        self._closing = False

    def use_limit(self, most: int) -> None:
        """Hold new links to this limit; those that there are stay."""
        self._most = most

    # PeerPort

    def send_frame(self, node: str, frame: Frame) -> None:
        """Send a control frame; dropped if there is no link to the node."""
        link = self._up.get(node)
        if link is not None:
            link.send(frame)

    def link(self, node: str) -> Link | None:
        """Return the live link to the node, for data."""
        link = self._up.get(node)
        return link.link if link is not None else None

    # The agent's side

    def view(self) -> tuple[ReachablePeer, ...]:
        """Return the peers that can be reached now."""
        now = self.sink.now()
        for node in self._up:
            self._watch.note(node)
        return tuple(
            ReachablePeer(
                node,
                link.incarnation,
                link.address,
                link.link.remote_address,
                self._liveness.silence(node, now),
                *carrier(link.link),
                version=link.link.version,
            )
            for node, link in sorted(self._up.items())
        )

    def not_reached(self) -> tuple[tuple[str, str], ...]:
        """Return (node, why) of the agents that are known and have no link; the node is empty where it is not known."""
        now = self.sink.now()
        found = {
            node: f"lost {now - at:.1f} s ago: {message}"
            for node, (at, message) in self._lost.items()
            if now - at < LOST_SHOWN
        }
        unnamed = []
        for dialler in self._diallers.active:
            if dialler.connected or dialler.node in self._up:
                continue
            why = dialler.failure or f"it cannot be reached at {dialler.target.address}"
            if dialler.node:
                found.setdefault(dialler.node, why)
            else:
                unnamed.append(("", why))
        if self._problem:
            unnamed.append(("", self._problem))
        return (*sorted(found.items()), *unnamed)

    def never_reached(self) -> tuple[str, ...]:
        """Return the listed agents to which there was never a link, by address."""
        return tuple(
            dialler.target.address
            for dialler in self._diallers.active
            if not (dialler.target.heard or dialler.reached or dialler.node in self._up or dialler.node in self._lost)
        )

    def lost(self) -> tuple[str, ...]:
        """Return the agents that had a link and have none now, unless they left in order."""
        now = self.sink.now()
        return tuple(node for node, (at, _) in sorted(self._lost.items()) if now - at < LOST_SHOWN)

    def links(self) -> tuple[Link, ...]:
        """Return all links that are open, those that are not chosen too."""
        return tuple(link.link for link in self._links if link.state is not LinkState.NEW)

    def wanted(self) -> tuple[tuple[str, str], ...]:
        """Return (node, address) of the agents that are dialled and have no link; the node may be empty."""
        return tuple(
            (dialler.node, dialler.target.address)
            for dialler in self._diallers.active
            if not dialler.connected and dialler.node not in self._up
        )

    @property
    def advertised(self) -> str:
        """Where others may dial this agent; empty where it does not listen, or that is not known."""
        return self._advertised

    async def listen(self, address: str) -> Listener:
        """Accept links at ``scheme://host:port``.

        :raises ConfigError: as ``Transport.listen``.
        """
        return await self._transport(scheme_of(address)).listen(address, self._accepted, self._options)

    def start(self, advertised: str) -> None:
        """Begin to watch the links. ``advertised``: where others may dial this agent, empty for nowhere."""
        self._advertised = advertised
        self._watch.start()

    def dial(self, target: Target) -> Dialler:
        """Keep a link to ``target`` from now on; return who does so. A target that is known already stays as it is."""
        return self._diallers.dial(target)

    def drop(self, target: Target) -> None:
        """Dial ``target`` no more. A link that was made stays until it ends."""
        self._diallers.drop(target)

    def keep_to(self, listing: Listing) -> None:
        """Dial whom a listing names; whom it names no more, only for as long as there is a link to it."""
        self._problem = listing.problem
        self._diallers.keep_to(listing.targets)
        if listing.own and not self._advertised and not self._closing:
            self._advertised = listing.own
            for link in self._up.values():
                link.send(PeerTable(((self._node, listing.own),)))

    async def close(self, timeout: float) -> None:
        """Say goodbye to every peer and close the links in order; cut those that are not closed after ``timeout``."""
        self._closing = True
        await self._diallers.close()
        loop = asyncio.get_running_loop()
        closing = []
        for link in list(self._links):
            if link.state is LinkState.CHOSEN:
                self._liveness.goodbye(link.node, self.sink.now())
                link.send(Goodbye(STOPS))
                closing.append(loop.create_task(link.link.close(timeout)))
            elif link.state is LinkState.CANDIDATE:
                link.link.abort(AgentUnavailable(f"agent {self._node!r} stops"))
        if closing:
            await asyncio.wait(closing)
        try:
            async with asyncio.timeout(timeout):
                for link in list(self._links):
                    await link.over.wait()
        except TimeoutError:
            logger.error("event=links_left links=%d", len(self._links))
        self._watch.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # Links

    def _accepted(self, link: Link) -> LinkEvents:
        if link.peer.node == self._node:
            raise AuthenticationError(f"the agent at {link.remote_address} has this one's name", hint=OWN_NAMES)
        if self._closing:
            raise AgentUnavailable(f"agent {self._node!r} stops")
        peer_link = PeerLink(self)
        self._links.add(peer_link)
        # Not used from inside this callback: the transport starts the link after it.
        asyncio.get_running_loop().call_soon(peer_link.open, link)
        return peer_link

    async def _connect(self, target: Target) -> PeerLink:
        """Dial once; return the link once it is chosen or over."""
        peer_link = PeerLink(self, target)
        self._links.add(peer_link)
        try:
            link = await self._transport(scheme_of(target.address)).connect(target.address, peer_link, self._options)
        except BaseException as error:
            if peer_link.state is LinkState.NEW:
                self._links.discard(peer_link)
            if isinstance(error, AllReducedError) and is_refusal(error):
                self._refused_at(target.address)
            raise
        peer_link.open(link)
        await peer_link.settled.wait()
        if peer_link.refused is not None:
            raise peer_link.refused
        return peer_link

    def _wrong_name(self, link: PeerLink) -> ConfigError | None:
        name, target = link.node, link.target
        if target is None:
            return None
        if name == self._node:
            return ConfigError(
                f"the agent at {target.address} is called {name!r}, like this one", path="agent.node", hint=OWN_NAMES
            )
        if target.node and name != target.node:
            return ConfigError(
                f"the agent at {target.address} is called {name!r}, not {target.node!r} as it is listed",
                path="peers.static",
                hint="correct the list",
            )
        return None

    def introduce(self, link: PeerLink) -> None:
        """Choose or refuse a new link, or wait for the other side to choose. See the module."""
        if self._closing:
            self._refuse(link, f"agent {self._node!r} stops")
            return
        wrong = self._wrong_name(link)
        if wrong is not None:
            link.refused = wrong
            self._refuse(link, wrong.message)
            return
        if link.node not in self._up and len(self._up) >= self._most:
            error = LimitExceeded(
                f"agent {self._node!r} has links to {self._most} agents, the most that it allows (limits.peers)",
                limit="limits.peers",
                hint="raise limits.peers there",
            )
            link.refused = error
            self._turn_away(link, Kind.LIMIT, str(error))
            return
        if link.target is not None:
            self._diallers.led_to(link.target.address, link.node)
        if not self._liveness.welcome(link.node, link.incarnation):
            self._turn_away(
                link, Kind.NAME, f"an agent {link.node!r} that was started later is known here; {OWN_NAMES}"
            )
            return
        known = self._up.get(link.node)
        if known is not None and (self._node < link.node or known.incarnation != link.incarnation):
            link.contested = True
            known.send(Heartbeat())  # a connection that is dead answers it with a reset
        elif self._node < link.node:
            self._choose(link)

    def first_frame(self, link: PeerLink) -> None:
        """Follow the choice of the other side, unless it is to be seen first who that is."""
        if not self._closing and not link.contested:
            # It would not have chosen another link if it still had the old one.
            self._choose(link)

    def turned_away(self, link: PeerLink, reason: str) -> None:
        """Take note that the other agent does not want a candidate, and why."""
        self._log.warning("event=turned_away peer=%s reason=%r", link.node, reason)
        self._over(link)

    def said_goodbye(self, link: PeerLink, reason: str) -> None:
        """Take note that the peer leaves; the link that is used ends soon."""
        if reason != STOPS:
            self._log.warning("event=turned_away peer=%s reason=%r", link.node, reason)
        self._liveness.goodbye(link.node, self.sink.now())

    def ended(self, link: PeerLink, error: AllReducedError | None) -> None:
        """Take note of a link's end: one that was used is dialled again."""
        self._links.discard(link)
        self.traffic.ended(link.link, orderly=link.state is not LinkState.CHOSEN or link.goodbye or self._closing)
        if link.state is LinkState.CHOSEN:
            self._watch.note(link.node)
            self._retire(link)
            reason = error or AgentUnavailable("it closed the link without a goodbye")
            self._tell(self._liveness.link_ended(link.node, self.sink.now(), reason))
            if not link.goodbye:
                self._diallers.dial_back(link.node, link.address)
        self._over(link)
        self._settle_contests()

    def _choose(self, link: PeerLink) -> None:
        """Use the link from now on. What came before on another one of this node is over."""
        known = self._up.get(link.node)
        if known is not None:
            self._retire(known)
            self._over(known)
            known.link.abort(AgentUnavailable("another link took its place"))
        link.state = LinkState.CHOSEN
        link.contested = False
        self._up[link.node] = link
        link.settled.set()
        self._log_carrier(link)
        # The first frame tells the other side that this link was chosen.
        table = [(other.node, other.address) for other in self._up.values() if other.address and other is not link]
        own = [(self._node, self._advertised)] if self._advertised else []
        link.send(PeerTable(tuple(own + table)[:MAX_PEERS], self._timing.failure_timeout))
        self._tell(self._liveness.link_up(link.node, link.incarnation, self.sink.now()))
        self._watch.schedule()
        self._diallers.wake(link.node)
        link.replay()

    def _log_carrier(self, link: PeerLink) -> None:
        scheme, way = carrier(link.link)
        level = logging.WARNING if self._rdma_expected and link.link.fallback_reason else logging.INFO
        logger.log(level, "event=link_used peer=%s data=%s way=%r", link.node, scheme, way)

    def _refuse(self, link: PeerLink, reason: str) -> None:
        """Drop a link that is not used, which is nobody's fault."""
        logger.debug("event=link_refused peer=%s reason=%r", link.node, reason)
        self._over(link)
        link.link.abort(AgentUnavailable(f"the link to agent {link.node!r} is not used: {reason}"))

    def _turn_away(self, link: PeerLink, kind: Kind, reason: str) -> None:
        """Drop a link that there should not be, and let both logs tell why."""
        refused(Plane.PEERS, kind)
        address = link.link.remote_address
        self._log.warning("event=agent_refused peer=%s address=%s reason=%r", link.node, address, reason)
        link.send(Goodbye(reason))
        self._over(link)
        task = asyncio.get_running_loop().create_task(link.link.close(min(self._timing.connect, LONGEST_FAREWELL)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _over(self, link: PeerLink) -> None:
        link.state = LinkState.OVER
        link.settled.set()

    def _retire(self, link: PeerLink) -> None:
        if self._up.get(link.node) is link:
            del self._up[link.node]

    # Contests of two links

    def _settle_contests(self) -> None:
        now = self.sink.now()
        for link in list(self._links):
            if link.contested and link.state is LinkState.CANDIDATE:
                self._settle_contest(link, now)

    def _settle_contest(self, link: PeerLink, now: float) -> None:
        timing = self._timing
        known = self._up.get(link.node)
        later = known is not None and link.incarnation != known.incarnation
        waited = now - link.opened_at
        # What was under way when the new link came says nothing; heartbeats come more often than that takes.
        if known is not None and known.link.last_received > link.opened_at + timing.tolerance:
            if later:
                self._turn_away(
                    link, Kind.NAME, f"an agent {link.node!r} that was started earlier is still there; {OWN_NAMES}"
                )
            else:
                self._refuse(link, "there is a link between these agents already")
        elif known is None or waited > timing.failure_timeout / (2 if later else 4):
            link.contested = False
            if self._node < link.node or link.used_by_peer:
                self._choose(link)

    # What the failure detector finds

    def _looked(self, look: Look, now: float) -> None:
        """Act on a look at the links: cut those of silent peers, drop candidates that nobody wants."""
        for node in look.silent:
            link = self._up.get(node)
            if link is not None:
                self._retire(link)
                self._over(link)
                link.link.abort(AgentUnavailable(f"agent {node!r} was silent for too long"))
                self._diallers.dial_back(node, link.address)
        self._tell(look.verdicts)
        self._settle_contests()
        self._look_at_homes()
        for link in list(self._links):
            if link.state is LinkState.CANDIDATE and now - link.opened_at > self._timing.failure_timeout:
                self._refuse(link, f"agent {link.node!r} did not use it")

    def _refused_at(self, address: str) -> None:
        homes, now = self._diallers.homes, self.sink.now()
        node = homes.home_of(address)
        if node in self._up:
            homes.refused_while_up(address, now)
        elif node is not None:
            self._tell(self._liveness.refused(node, now))

    def _look_at_homes(self) -> None:
        """Find out which addresses refuse connections though their agents live."""
        tolerance = self._timing.tolerance  # what was under way when it refused says nothing
        for node, link in self._up.items():
            for address in self._diallers.homes.heard(node, link.link.last_received - tolerance):
                logger.warning("event=address_shut peer=%s address=%s", node, address)

    def _tell(self, verdicts: Iterable[Verdict]) -> None:
        """Log what is found about peers, and tell the memberships."""
        for verdict in verdicts:
            node = verdict.node
            self._note_lost(verdict)
            match verdict:
                case PeerUp():
                    logger.info("event=peer_up peer=%s incarnation=%d", node, verdict.incarnation)
                case LinkLost():
                    logger.warning("event=link_lost peer=%s reason=%r", node, verdict.reason)
                case PeerDown(error=None):
                    logger.info("event=peer_left peer=%s", node)
                case PeerDown(error=AllReducedError() as error, proven=proven):
                    logger.warning("event=peer_lost peer=%s proven=%s error=%r", node, proven, error.message)
            if self._liveness.state(node) is None:
                self._diallers.forget(node)
            self.sink.membership_event(verdict)

    def _note_lost(self, verdict: Verdict) -> None:
        """Remember why there is no link to an agent, for ``status``."""
        lost = self._lost
        match verdict:
            case PeerUp(node=node) | PeerDown(node=node, error=None):
                lost.pop(node, None)
            case LinkLost(node=node):
                lost[node] = self.sink.now(), "its link ended"
            case PeerDown(node=node, error=AllReducedError() as error):
                lost[node] = self.sink.now(), error.message
                self.traffic.lost(node)
        while len(lost) > MAX_LOST:
            del lost[next(iter(lost))]

    # Who else there is

    def table_received(self, link: PeerLink, table: PeerTable) -> None:
        """Dial agents that are new here, and tell the others of the peer itself."""
        if table.failure_timeout:
            self._keep_pace(link.node, table.failure_timeout)
        for node, address in table.peers:
            if node == link.node:
                if address != link.address:
                    link.address = address
                    self._diallers.told(address, node, link.link.remote_address)
                    self._tell_others(link, PeerTable(((node, address),)))
            elif node != self._node and node not in self._up:
                self._diallers.heard_of(node, address)

    def _keep_pace(self, node: str, failure_timeout: float) -> None:
        """Send heartbeats as often as the peer needs them: it may have other settings, as while these are changed."""
        self._liveness.keep_pace(node, heartbeat(failure_timeout), self.sink.now())
        self._watch.schedule()
        own = self._timing.failure_timeout
        if failure_timeout != own:
            self._log.warning("event=timeouts_differ peer=%s failure_timeout=%g own=%g", node, failure_timeout, own)

    def status_received(self, link: PeerLink, frame: StatusFrame) -> None:
        """Hand on a question about what runs here, or the answer to one."""
        if self.on_status is not None:
            self.on_status(link.node, frame)

    def load_received(self, link: PeerLink, frame: LoadFrame) -> None:
        """Hand on a frame that measures a link, or the answer to one."""
        if self.on_load is not None:
            self.on_load(link.node, frame)

    def _tell_others(self, link: PeerLink, table: PeerTable) -> None:
        for other in self._up.values():
            if other is not link:
                other.send(table)
