"""The peer plane: which agents are reachable, over which link, and since when one is not.

Either side dials. Of the links between two agents the one with the lower name chooses one, by using it first; the
other waits for that before it uses a link. So exactly one link carries frames and nothing is lost in between.

A link that is silent for longer than the failure timeout, or that ends, means that the peer is lost; it is dialled
again. Time in which this agent itself was held up is not charged to its peers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from allreduced.core.addresses import parse_address
from allreduced.core.errors import (
    AgentUnavailable,
    AllReducedError,
    AuthenticationError,
    ConfigError,
    PeerLost,
    ProtocolError,
)
from allreduced.daemon.dialler import Dialler
from allreduced.daemon.membership.events import PeerDown, PeerUp
from allreduced.daemon.peer_link import LinkOwner, LinkSink, LinkState, PeerLink, Target
from allreduced.protocol.peer import MAX_PEERS, Frame, Goodbye, Heartbeat, PeerTable, StatusFrame
from allreduced.transports.base import Link, LinkEvents, LinkOptions, Listener, Transport

logger = logging.getLogger("allreduced.peers")

TICKS = 8
"""The links are looked at this often per failure timeout; heartbeats go out at least every second time."""

MAX_LOST = 256
"""Lost agents that are remembered, for ``status``."""

LOST_SHOWN = 3600.0
"""Seconds for which they are."""


@dataclass(frozen=True, slots=True)
class PeerView:
    """A reachable peer, for ``status``. ``silence`` in seconds."""

    node: str
    incarnation: int
    address: str
    remote: str
    silence: float


class Peers(LinkOwner):
    """Implements ``PeerPort``. Use it on one loop: listen, :meth:`start`, add whom to dial, in the end :meth:`close`.

    ``failure_timeout``: seconds of silence after which a peer is lost. ``transport``: finds a transport by its scheme.
    """

    def __init__(
        self,
        node: str,
        incarnation: int,
        sink: LinkSink,
        options: LinkOptions,
        transport: Callable[[str], Transport],
        *,
        failure_timeout: float,
    ) -> None:
        self.sink = sink
        self.on_status: Callable[[str, StatusFrame], None] | None = None
        """Called with what the agent of a node asks about this one, or answers; set before links are made."""
        self._node = node
        self._incarnation = incarnation
        self._options = options
        self._transport = transport
        self._timeout = failure_timeout
        self._up: dict[str, PeerLink] = {}
        self._lost: dict[str, tuple[float, str]] = {}
        """By node: since when there is no link to it any more, and why."""
        self._links: set[PeerLink] = set()
        self._diallers: dict[Target, Dialler] = {}
        self._advertised = ""
        self._monitor: asyncio.Task[None] | None = None
        self._closing = False

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

    def view(self) -> tuple[PeerView, ...]:
        """Return the peers that can be reached now."""
        now = self.sink.now()
        return tuple(
            PeerView(node, link.incarnation, link.address, link.link.remote_address, link.silence(now))
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
        for target, dialler in self._diallers.items():
            if dialler.done or dialler.connected or dialler.node in self._up:
                continue
            why = f"it cannot be reached at {target.address}"
            if dialler.node:
                found.setdefault(dialler.node, why)
            else:
                unnamed.append(("", why))
        return (*sorted(found.items()), *unnamed)

    async def listen(self, address: str) -> Listener:
        """Accept links at ``scheme://host:port``.

        :raises ConfigError: as ``Transport.listen``.
        """
        return await self._transport(address.partition("://")[0]).listen(address, self._accepted, self._options)

    def start(self, advertised: str) -> None:
        """Begin to watch the links. ``advertised``: where others may dial this agent, empty for nowhere."""
        self._advertised = advertised
        self._monitor = asyncio.get_running_loop().create_task(self._watch(), name="peers")
        self._monitor.add_done_callback(_watch_ended)

    def dial(self, target: Target) -> Dialler:
        """Keep a link to ``target`` from now on; return who does so. A target that is known already stays as it is."""
        known = self._diallers.get(target)
        if known is None:
            known = Dialler(target, self._connect, self._up.get, longest_pause=self._timeout / 5)
            self._diallers[target] = known
        return known

    async def close(self, timeout: float) -> None:
        """Say goodbye to every peer and close the links in order; cut those that are not closed after ``timeout``."""
        self._closing = True
        for dialler in self._diallers.values():
            await dialler.close()
        loop = asyncio.get_running_loop()
        closing = []
        for link in list(self._links):
            if link.state is LinkState.CHOSEN:
                link.send(Goodbye("the agent stops"))
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
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.wait([self._monitor])

    # Links

    def _accepted(self, link: Link) -> LinkEvents:
        if link.peer.node == self._node:
            raise AuthenticationError(f"the agent at {link.remote_address} is also called {self._node!r}")
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
        scheme = target.address.partition("://")[0]
        try:
            link = await self._transport(scheme).connect(target.address, peer_link, self._options)
        except BaseException:
            if peer_link.state is LinkState.NEW:
                self._links.discard(peer_link)
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
                f"the agent at {target.address} is called {name!r}, like this one",
                path="agent.node",
                hint="give each agent its own name",
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
        known = self._up.get(link.node)
        if known is not None and known.incarnation != link.incarnation:
            if link.incarnation < known.incarnation:
                self._refuse(link, f"an agent {link.node!r} that was started later is known")
                return
            self._lose(known, PeerLost(f"agent {link.node!r} was started anew", nodes=(link.node,)))
            known = None
        if self._node < link.node:
            if known is not None:
                self._refuse(link, "there is a link between these agents already")
            else:
                self._choose(link)

    def first_frame(self, link: PeerLink) -> None:
        """Follow the choice of the other side."""
        if self._closing:
            return  # cut already, and about to be over
        known = self._up.get(link.node)
        if known is not None:
            # It would not have chosen another link if it still had the old one.
            self._lose(known, PeerLost(f"the link to agent {link.node!r} was lost", nodes=(link.node,)))
        self._choose(link)

    def ended(self, link: PeerLink, error: AllReducedError | None) -> None:
        """Take note of a link's end; a chosen one that ends means that the peer is down."""
        self._links.discard(link)
        if link.state is LinkState.CHOSEN:
            self._retire(link)
            if error is None and (link.goodbye or self._closing):
                logger.info("event=peer_left node=%s", link.node)
                self.sink.membership_event(PeerDown(link.node, None))
            else:
                self._down(link, _lost(link.node, error))
        link.state = LinkState.OVER
        link.settled.set()

    def _choose(self, link: PeerLink) -> None:
        link.state = LinkState.CHOSEN
        self._up[link.node] = link
        self._lost.pop(link.node, None)
        link.settled.set()
        logger.info("event=peer_up node=%s address=%s", link.node, link.link.remote_address)
        # The first frame tells the other side that this link was chosen.
        known = [(other.node, other.address) for other in self._up.values() if other.address and other is not link]
        own = [(self._node, self._advertised)] if self._advertised else []
        link.send(PeerTable(tuple(own + known)[:MAX_PEERS]))
        self.sink.membership_event(PeerUp(link.node, link.incarnation))

    def _refuse(self, link: PeerLink, reason: str) -> None:
        logger.debug("event=link_refused node=%s reason=%r", link.node, reason)
        link.state = LinkState.OVER
        link.settled.set()
        link.link.abort(AgentUnavailable(f"the link to agent {link.node!r} is not used: {reason}"))

    def _lose(self, link: PeerLink, error: AllReducedError) -> None:
        """Cut a chosen link and tell, without waiting for its last callback."""
        self._retire(link)
        link.state = LinkState.OVER
        link.link.abort(error)
        self._down(link, error)

    def _retire(self, link: PeerLink) -> None:
        if self._up.get(link.node) is link:
            del self._up[link.node]

    def _down(self, link: PeerLink, error: AllReducedError) -> None:
        logger.warning("event=peer_lost node=%s error=%r", link.node, error.message)
        self._lost[link.node] = (self.sink.now(), error.message)
        while len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        self.sink.membership_event(PeerDown(link.node, error))

    # Who else there is

    def table_received(self, link: PeerLink, table: PeerTable) -> None:
        """Dial agents that are new here, and tell the others of the peer itself."""
        for node, address in table.peers:
            if node == link.node:
                if address != link.address:
                    link.address = address
                    self._tell_others(link, PeerTable(((node, address),)))
            elif node != self._node and node not in self._up:
                self._heard_of(node, address)

    def status_received(self, link: PeerLink, frame: StatusFrame) -> None:
        """Hand on a question about what runs here, or the answer to one."""
        if self.on_status is not None:
            self.on_status(link.node, frame)

    def _tell_others(self, link: PeerLink, table: PeerTable) -> None:
        for other in self._up.values():
            if other is not link:
                other.send(table)

    def _heard_of(self, node: str, address: str) -> None:
        if self._closing or len(self._diallers) >= MAX_PEERS:
            return
        if any(target.node == node for target in self._diallers):
            return
        try:
            if not address.startswith("inproc://"):
                parse_address(address)
        except ConfigError as error:
            logger.warning("event=bad_address node=%s error=%r", node, error.message)
            return
        # The other one hears of this agent too; one of the two dials first.
        self.dial(Target(address, node, heard=True, patience=self._timeout / 10 if self._node > node else 0.0))

    # Signs of life

    async def _watch(self) -> None:
        tick = self._timeout / TICKS
        due = self.sink.now() + tick
        while True:
            await asyncio.sleep(due - self.sink.now())
            now = self.sink.now()
            late = now - due
            if late > tick / 2:
                if late > self._timeout / 4:
                    logger.warning("event=held_up seconds=%.2f", late)
                for link in self._links:
                    if link.state is LinkState.CHOSEN:
                        link.forgive(late)
            due = now + tick
            for link in list(self._links):
                self._look_at(link, now, tick)
            for target, dialler in list(self._diallers.items()):
                if dialler.done:
                    del self._diallers[target]
                    await dialler.close()

    def _look_at(self, link: PeerLink, now: float, tick: float) -> None:
        if link.state is LinkState.CANDIDATE and now - link.opened_at > self._timeout:
            self._refuse(link, f"agent {link.node!r} did not use it")
        elif link.state is LinkState.CHOSEN:
            silence = link.silence(now)
            if silence > self._timeout:
                self._lose(
                    link,
                    PeerLost(
                        f"agent {link.node!r} was silent for {silence:.1f} s",
                        nodes=(link.node,),
                        hint="is its machine overloaded or cut off? failure_timeout is the limit",
                    ),
                )
            elif now - link.last_sent >= tick:
                link.send(Heartbeat())


async def reached(diallers: Iterable[Dialler], timeout: float) -> None:
    """Wait until each target was reached once; return after ``timeout`` seconds in any case.

    :raises AuthenticationError: a target has another secret.
    :raises ProtocolError: a target is no agent.
    :raises ConfigError: a target has a wrong name.
    """
    try:
        async with asyncio.timeout(timeout):
            for dialler in diallers:
                await dialler.first_result()
    except TimeoutError:
        logger.info("event=not_reached_yet after=%.1fs", timeout)


def _lost(node: str, error: AllReducedError | None) -> AllReducedError:
    if isinstance(error, PeerLost):
        return error
    reason = error.message if error is not None else "it closed the link without a goodbye"
    hint = error.hint if isinstance(error, ProtocolError) else "was it killed? see its log"
    return PeerLost(f"agent {node!r} is lost: {reason}", nodes=(node,), hint=hint)


def _watch_ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("event=defect what=%r", "the watch over the links ended", exc_info=error)
