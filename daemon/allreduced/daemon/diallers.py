"""Whom this agent dials, and at which addresses a refused connection proves that a peer is dead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from allreduced.core.addresses import parse_address
from allreduced.core.errors import ConfigError
from allreduced.daemon.dialler import Dialler
from allreduced.daemon.homes import Homes
from allreduced.daemon.peer_link import PeerLink, Target
from allreduced.daemon.timing import Timing
from allreduced.protocol.peer import MAX_PEERS

logger = logging.getLogger("allreduced.peers")


class Diallers:
    """All diallers of an agent. ``connect`` and ``up``: see Dialler."""

    def __init__(
        self,
        node: str,
        timing: Timing,
        connect: Callable[[Target], Awaitable[PeerLink]],
        up: Callable[[str], PeerLink | None],
    ) -> None:
        self._node = node
        self._timing = timing
        self._connect = connect
        self._up = up
        self._by_target: dict[Target, Dialler] = {}
        self.homes = Homes()
        self._listing: frozenset[Target] = frozenset()
        self._closed = False

    @property
    def active(self) -> tuple[Dialler, ...]:
        """Those that have not given up for good."""
        self._by_target = {target: dialler for target, dialler in self._by_target.items() if not dialler.done}
        return tuple(self._by_target.values())

    def dial(self, target: Target) -> Dialler:
        """Keep a link to ``target`` from now on; return who does so. A target that is known already stays as it is."""
        known = self._by_target.get(target)
        if known is None or known.done:
            known = Dialler(target, self._connect, self._up, timing=self._timing)
            self._by_target[target] = known
        known.relist()
        return known

    def keep_to(self, targets: frozenset[Target]) -> None:
        """Dial those that are new in a listing; those that are in it no more are dialled as long as they have a link.

        One that turned out to be this agent itself is not dialled again before it was out of the listing.
        """
        if self._closed:
            return
        before, self._listing = self._listing, targets
        for target in sorted(targets - before, key=lambda target: target.address):
            self.dial(target)
        for target in before - targets:
            if target in self._by_target:
                self._by_target[target].unlist()

    def heard_of(self, node: str, address: str) -> None:
        """Dial an agent that another one knows, unless that happens already."""
        if self._closed:
            return
        active = self.active
        if len(active) >= MAX_PEERS or any(dialler.target.node == node and dialler.listed for dialler in active):
            return
        try:
            if not address.startswith("inproc://"):
                parse_address(address)
        except ConfigError as error:
            logger.warning("event=bad_address peer=%s error=%r", node, error.message)
            return
        # The other one hears of this agent too; one of the two dials first.
        self.dial(Target(address, node, heard=True, patience=self._timing.longest_pause if self._node > node else 0.0))

    def drop(self, target: Target) -> None:
        """Dial a target no more. A link that was made stays until it ends."""
        known = self._by_target.pop(target, None)
        if known is not None:
            known.stop()

    def wake(self, node: str) -> None:
        """Let those that dial this agent try at once."""
        for dialler in self.active:
            if dialler.node == node:
                dialler.wake()

    def dial_back(self, node: str, address: str) -> None:
        """Dial an agent whose link ended: where that happens already at once, else at the address that it told."""
        if self._closed:
            return
        self.wake(node)
        if address and not any(dialler.node == node and dialler.listed for dialler in self.active):
            self.dial(Target(address, node, heard=True))

    def forget(self, node: str) -> None:
        """Expect nobody any more where an agent was that is gone for good, unless it is one that is listed."""
        self.homes.forget(node)
        for dialler in self.active:
            if dialler.target.heard and dialler.target.node == node:
                dialler.stop()

    # Proofs

    def led_to(self, address: str, node: str) -> None:
        """Take note that a link was made by dialling ``address``, and who was there."""
        logger.debug("event=address_led peer=%s address=%s", node, address)
        self.homes.led_to(address, node)

    def told(self, address: str, node: str, remote: str) -> None:
        """Take note of the address that a peer tells, and try it once; its link comes from ``remote``."""
        verified = self.homes.home_of(address) == node
        if not self.homes.told(address, node, remote) or verified or self._closed:
            return
        if not any(dialler.node == node and dialler.listed for dialler in self.active):
            self.dial(Target(address, node, heard=True)).doubt()

    async def close(self) -> None:
        """Dial no more."""
        self._closed = True
        for dialler in self.active:
            await dialler.close()


async def tried(diallers: Iterable[Dialler], timeout: float) -> None:
    """Wait until each target was dialled once, with whatever result; return after ``timeout`` seconds in any case."""
    try:
        async with asyncio.timeout(timeout):
            for dialler in diallers:
                await dialler.first_try()
    except TimeoutError:
        logger.info("event=not_tried_yet seconds=%.1f", timeout)


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
        logger.info("event=not_reached_yet seconds=%.1f", timeout)
