"""Two ranks of one group in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from allreduced.client import AsyncCommunicator

BOUND = 60.0
"""Seconds in which everything must have ended."""

Call: TypeAlias = "Callable[[AsyncCommunicator], Awaitable[Any]]"


@contextlib.asynccontextmanager
async def pair(socket: str) -> AsyncIterator[tuple[AsyncCommunicator, AsyncCommunicator]]:
    """Form a group of two at the agent."""

    async def join(rank: int) -> AsyncCommunicator:
        return await AsyncCommunicator.connect(
            job="pair", rank=rank, size=2, local_rank=rank, local_size=2, socket=socket
        )

    async with asyncio.timeout(BOUND):
        first, second = await asyncio.gather(join(0), join(1))
        try:
            yield first, second
        finally:
            await asyncio.gather(first.close(), second.close())


async def both(ranks: Sequence[AsyncCommunicator], *calls: Call) -> list[Any]:
    """Let each rank make its call, and return what they got."""
    return await asyncio.gather(*(call(rank) for rank, call in zip(ranks, calls, strict=True)))
