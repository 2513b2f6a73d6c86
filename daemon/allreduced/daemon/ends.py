"""The ends of all that an agent has started: each thing registers its own, and what came last ends first."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeAlias

logger = logging.getLogger("allreduced.agent")

End: TypeAlias = "Callable[[], Awaitable[object] | None]"
"""Ends one thing; what it returns, if anything, is awaited."""


class Ends:
    """Runs every end, whatever comes of those before: a defect in one must not keep memory, sockets and threads."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._failed: list[str] = []

    def push(self, what: str, end: End) -> None:
        """Have ``end`` called before all that were pushed earlier. ``what``: a word for the log."""
        self._stack.push_async_callback(self._run, what, end)

    async def close(self) -> tuple[str, ...]:
        """End everything, one thing after the other; return which ends raised, which the log has. Idempotent.

        Where it is cancelled the other ends are run all the same.
        """
        await self._stack.aclose()
        return tuple(self._failed)

    async def _run(self, what: str, end: End) -> None:
        try:
            if (ending := end()) is not None:
                await ending
        except Exception:
            self._failed.append(what)
            logger.exception("event=defect ending=%s", what)
