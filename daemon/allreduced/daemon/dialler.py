"""Keeps one link to one address: dials, waits while the peer is up, dials again as soon as it is not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from allreduced.core.errors import AgentUnavailable, AllReducedError
from allreduced.daemon.peer_link import LinkState, PeerLink, Target
from allreduced.daemon.timing import Timing
from allreduced.protocol.handshake import ConnectedToSelf

logger = logging.getLogger("allreduced.peers")

DOUBTS = 6
"""Tries, with growing pauses, to reach an agent at its listed address though it has dialled itself."""


class Dialler:
    """A task that keeps a link to ``target``, for ever.

    A link that ends is dialled again at once; pauses between further tries double up to the longest. ``connect`` dials
    once and returns the link once it is chosen or over. ``up`` finds the chosen link to a node.
    """

    def __init__(
        self,
        target: Target,
        connect: Callable[[Target], Awaitable[PeerLink]],
        up: Callable[[str], PeerLink | None],
        *,
        timing: Timing,
    ) -> None:
        self.target = target
        self._connect = connect
        self._up = up
        self._timing = timing
        self._node = target.node
        self._said = ""
        self._led_there = False
        self._listed = True
        self._doubts = 0 if target.heard else DOUBTS
        self._woken: asyncio.Event | None = None
        self._away = asyncio.Event()
        self._away.set()
        loop = asyncio.get_running_loop()
        self._tried = asyncio.Event()
        self._first: asyncio.Future[AllReducedError | None] = loop.create_future()
        self._task = loop.create_task(self._run(), name=f"dial {target.address}")
        self._task.add_done_callback(self._ended)

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

    @property
    def reached(self) -> bool:
        """True once there was a link to the agent at the target."""
        return self._first.done() and not self._first.cancelled() and self._first.result() is None

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

    async def first_try(self) -> None:
        """Return when the target was dialled once, with whatever result."""
        await self._tried.wait()

    def wake(self) -> None:
        """Try now, if it pauses: something is new about the agent at the target.

        A listed address is tried some more times though its agent has dialled meanwhile, to know whether it is the
        right one: only then does it prove something when it refuses connections one day.
        """
        if self._woken is not None:
            self._doubts = 0 if self._led_there or self.target.heard else DOUBTS
            self._woken.set()

    def doubt(self) -> None:
        """Try some times though there is a link: see :meth:`wake`."""
        self._doubts = DOUBTS

    @property
    def listed(self) -> bool:
        """False when it dials no more once its link is over."""
        return self._listed

    def relist(self) -> None:
        """Go on dialling, after :meth:`unlist`."""
        self._listed = True

    def unlist(self) -> None:
        """Dial no more once there is no link to the agent at the target: now, or when it ends."""
        self._listed = False
        if not self.connected:
            self._task.cancel()

    def stop(self) -> None:
        """Dial no more. A link that was made stays."""
        self._task.cancel()

    async def close(self) -> None:
        """Stop, and return when that has happened."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tried.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("event=dialler_failed address=%s", self.target.address, exc_info=error)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.target.patience)
        first, longest = self._timing.first_pause, self._timing.longest_pause
        pause = first
        while True:
            link = self._up(self._node) if self._node and not self._doubts else None
            if link is None:
                link = await self._try()
                # An agent that has dialled may not be reachable itself yet: a proxy or a service in front of it.
                self._doubts = max(self._doubts - 1, 0) if link is None else 0
            self._tried.set()
            if link is not None and link.state is LinkState.CHOSEN:
                self._result(None)
                self._said = ""
                self._away.clear()
                since = loop.time()
                await link.over.wait()
                self._away.set()
                if not self._listed or (link.goodbye and self.target.heard):
                    return
                if loop.time() - since > longest:
                    pause = first
                    continue  # a link that ends as soon as it is made is no reason to hurry
            elif self._first.done() and isinstance(self._first.result(), ConnectedToSelf):
                return
            pause = first if await self._woken_within(pause) else min(2 * pause, longest)

    async def _woken_within(self, seconds: float) -> bool:
        self._woken = asyncio.Event()
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return False
        finally:
            self._woken = None
        return True

    async def _try(self) -> PeerLink | None:
        try:
            link = await self._connect(self.target)
        except AllReducedError as error:
            if not isinstance(error, AgentUnavailable):
                self._result(error)
            self._say(error)
            return None
        self._node = link.node
        self._led_there = True
        # The link may not be the one that was chosen, but the peer is the right one.
        return self._up(link.node) or link

    @property
    def failure(self) -> str:
        """Why the last try failed; empty where there was none."""
        return self._said

    def _result(self, error: AllReducedError | None) -> None:
        if not self._first.done():
            self._first.set_result(error)

    def _say(self, error: AllReducedError) -> None:
        """Log an error once, and again only when it changes."""
        if error.message != self._said:
            self._said = error.message
            level = logging.INFO if isinstance(error, AgentUnavailable) else logging.ERROR
            logger.log(level, "event=not_reached address=%s error=%r", self.target.address, str(error))
