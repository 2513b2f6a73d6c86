"""How an agent comes among the others: it listens for them, dials them, and meets those of its job."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Coroutine

from allreduced.core.addresses import parse_address
from allreduced.core.errors import ConfigError, ProtocolError
from allreduced.daemon.dialler import Dialler
from allreduced.daemon.diallers import reached, tried
from allreduced.daemon.discovery import discovery, listed
from allreduced.daemon.discovery_port import Found
from allreduced.daemon.peers import Peers
from allreduced.daemon.reachability import advertised, check_access, stays_here
from allreduced.daemon.settings import Settings
from allreduced.transports.base import Listener

logger = logging.getLogger("allreduced.agent")

REACH_TIMEOUT = 3.0
"""Seconds to wait for the meeting point, or for the first round to the listed agents, before the agent is ready anyway;
they are dialled on."""

ANSWER_TIMEOUT = 10.0
"""The same where something listens there already."""

TAKE_OVER_PAUSE = 0.25
"""Seconds between tries to listen at a meeting point whose holder is gone."""


class Entrance:
    """Owns the addresses at which other agents reach this one. Use it on one loop.

    ``guarded``: others must prove that they belong, by a secret or a certificate. ``join``: ``host:port`` where the
    agents of a job meet.
    """

    def __init__(self, peers: Peers, settings: Settings, *, guarded: bool, join: str) -> None:
        self._peers = peers
        self._settings = settings
        self._guarded = guarded
        self._join = join
        self._listeners: list[Listener] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        """Listen, and dial every agent that is known once, but do not wait for those that do not answer for long.

        Return where others find this agent, else where it listens; empty where it does not.

        :raises ConfigError: an address cannot be used, or something that is no agent is at the meeting point.
        :raises AuthenticationError: others could reach this agent without a secret, or have another one.
        """
        ways = discovery(self._settings, self._join)
        found = await ways.find(self._listen)
        listen = ""
        if found.listener is not None:
            targets = [target.address for target in (*found.targets, *found.listing.targets)]
            where = parse_address(found.listener.address)
            listen = await advertised(where, self._settings.peers.advertise or found.listing.own, targets)
        self._peers.start(listen)
        diallers = [self._peers.dial(target) for target in found.targets]
        self._peers.keep_to(found.listing)
        self._spawn(ways.follow(listen, self._peers.keep_to))
        if self._join:
            await self._meet(found, diallers)
        else:
            diallers += [self._peers.dial(target) for target in found.listing.targets]
            await tried(diallers, REACH_TIMEOUT)
        return listen or (found.listener.address if found.listener is not None else "")

    def use_settings(self, settings: Settings) -> None:
        """Dial the agents that are listed now. Links to those that are listed no more stay until they end."""
        old, self._settings = self._settings, settings
        before, after = listed(old), listed(settings)
        if self._join or before == after:
            return
        for target in before:
            if target not in after:
                self._peers.drop(target)
        for target in after:
            self._peers.dial(target)

    async def stop(self) -> None:
        """Find nobody new and take over no address any more. Idempotent."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Close all addresses."""
        for listener in self._listeners:
            await listener.close()

    async def _listen(self, address: str) -> Listener:
        parsed = parse_address(address, path="peers.listen", any_port=True)
        local = await stays_here(parsed)
        check_access(parsed, local=local, guarded=self._guarded, insecure=self._settings.security.insecure)
        listener = await self._peers.listen(str(parsed))
        self._listeners.append(listener)
        return listener

    async def _meet(self, found: Found, diallers: list[Dialler]) -> None:
        try:
            await reached(diallers, ANSWER_TIMEOUT if found.taken else REACH_TIMEOUT)
        except ProtocolError as error:
            where = found.targets[0].address
            raise ConfigError(
                f"{where}, where the agents of this job are to meet, is used by something that is no agent",
                path="join",
                hint=f"choose another port ({error.message})",
            ) from error
        if found.taken:
            self._spawn(self._take_over(found.taken, diallers[0]))

    async def _take_over(self, meeting: str, dialler: Dialler) -> None:
        """Listen at the meeting point once its holder is gone, which may have been the agent of an earlier job."""
        while True:
            await dialler.away()
            try:
                await self._listen(meeting)
            except ConfigError as error:
                if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                    raise
                await asyncio.sleep(TAKE_OVER_PAUSE)
                continue
            await dialler.close()
            logger.info("event=meeting_point_taken_over address=%s", meeting)
            return

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("event=task_failed error=%r", str(error), exc_info=error)
