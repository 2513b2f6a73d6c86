"""Brings the completions of a queue to the event loop, without ever blocking in a verb."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from allreduced.transports.base import LinkStats
from allreduced.transports.rdma.verbs_port import Completion, CompletionQueue, VerbsError

BATCH: Final = 32
"""Completions taken before the loop gets to others."""
MOST_POLLS: Final = 4
"""Polls in vain before the next event is waited for."""


class CompletionWatch:
    """Calls ``handle`` with completions, in batches, from the loop.

    After an event the queue is polled once per turn of the loop while it gives something. How often it is polled in
    vain before the next event is asked for adapts to whether that paid lately, from not at all to ``MOST_POLLS``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        queue: CompletionQueue,
        stats: LinkStats,
        handle: Callable[[list[Completion]], None],
        failed: Callable[[VerbsError], None],
        *,
        solicited_only: bool,
    ) -> None:
        self._loop = loop
        self._queue = queue
        self._stats = stats
        self._handle = handle
        self._failed = failed
        self._solicited_only = solicited_only
        self._descriptor = queue.descriptor
        self._running = False
        self._allowed = 0
        self._vain = 0
        self._scheduled: asyncio.Handle | None = None

    def start(self) -> None:
        """Begin; completions that are there already come soon."""
        self._running = True
        self._loop.add_reader(self._descriptor, self._event)
        self._scheduled = self._loop.call_soon(self._work)

    def stop(self) -> None:
        """Call nothing any more."""
        if self._running:
            self._running = False
            self._loop.remove_reader(self._descriptor)
            if self._scheduled is not None:
                self._scheduled.cancel()

    def _event(self) -> None:
        try:
            self._queue.take_event()
        except VerbsError as error:
            self._failed(error)
            return
        self._stats.completion_events += 1
        if self._scheduled is None:
            self._work()

    def _work(self) -> None:
        self._scheduled = None
        try:
            found = self._queue.poll(BATCH)
            if found and self._vain:
                self._allowed = min(MOST_POLLS, self._allowed * 2 or 1)  # looking again paid
            if not found and self._vain >= self._allowed:
                self._allowed //= 2
                self._vain = 0
                self._queue.arm(solicited_only=self._solicited_only)
                found = self._queue.poll(BATCH)  # what came before it was armed causes no event
                if not found:
                    return
            elif not found:
                self._vain += 1
            else:
                self._vain = 0
        except VerbsError as error:
            self._failed(error)
            return
        if found:
            self._handle(found)
        if self._running:
            self._scheduled = self._loop.call_soon(self._work)
