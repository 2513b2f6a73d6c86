"""Keeps one link to one address: dials, waits while the peer is up, dials again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from allreduced.core.errors import AgentUnavailable, AllReducedError
from allreduced.daemon.peer_link import LinkState, PeerLink, Target
from allreduced.protocol.handshake import ConnectedToSelf

logger = logging.getLogger("allreduced.peers")

FIRST_PAUSE = 0.05


class Dialler:
    """A task that keeps a link to ``target``: pauses between tries double up to ``longest_pause`` seconds, for ever.

    ``connect`` dials once and returns the link once it is chosen or over. ``up`` finds the chosen link to a node.
    """

    def __init__(
        self,
        target: Target,
        connect: Callable[[Target], Awaitable[PeerLink]],
        up: Callable[[str], PeerLink | None],
        *,
        longest_pause: float,
    ) -> None:
        self.target = target
        self._connect = connect
        self._up = up
        self._longest = longest_pause
        self._node = target.node
        self._said = ""
        self._away = asyncio.Event()
        self._away.set()
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[AllReducedError | None] = loop.create_future()
        self._task = loop.create_task(self._run(), name=f"dial {target.address}")

    @property
    def done(self) -> bool:
        """True when it gave up for good: the target is this agent itself, or said goodbye."""
        return self._task.done()

    @property
    def node(self) -> str:
        """The name of the agent at the target; empty as long as it is not known."""
        return self._node

    @property
    def connected(self) -> bool:
        """True while there is a link to the agent at the target."""
        return not self._away.is_set()

    async def away(self) -> None:
        """Return as soon as the agent at the target is not connected: at once, or when its link ends."""
        await self._away.wait()

    async def first_result(self) -> None:
        """Return when the target was reached for the first time.

        :raises AllReducedError: it answered, but is not what was looked for. Unreachable targets are waited for.
        """
        error = await asyncio.shield(self._first)
        if error is not None:
            raise error

    async def close(self) -> None:
        """Stop. A link that was made stays."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and self._task.exception() is not None:
            logger.error("event=dialler_failed address=%s", self.target.address, exc_info=self._task.exception())

    async def _run(self) -> None:
        await asyncio.sleep(self.target.patience)
        pause = min(FIRST_PAUSE, self._longest)
        while True:
            link = self._up(self._node) if self._node else None
            if link is None:
                link = await self._try()
            if link is not None and link.state is LinkState.CHOSEN:
                self._result(None)
                self._said = ""
                pause = min(FIRST_PAUSE, self._longest)
                self._away.clear()
                await link.over.wait()
                self._away.set()
                if link.goodbye and self.target.heard:
                    return
            elif self._first.done() and isinstance(self._first.result(), ConnectedToSelf):
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._longest)

    async def _try(self) -> PeerLink | None:
        try:
            link = await self._connect(self.target)
        except AllReducedError as error:
            if not isinstance(error, AgentUnavailable):
                self._result(error)
            self._say(error)
            return None
        self._node = link.node
        # The link may not be the one that was chosen, but the peer is the right one.
        return self._up(link.node) or link

    def _result(self, error: AllReducedError | None) -> None:
        if not self._first.done():
            self._first.set_result(error)

    def _say(self, error: AllReducedError) -> None:
        """Log an error once, and again only when it changes."""
        if error.message != self._said:
            self._said = error.message
            level = logging.INFO if isinstance(error, AgentUnavailable) else logging.ERROR
            logger.log(level, "event=not_reached address=%s error=%r", self.target.address, str(error))
