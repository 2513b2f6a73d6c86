"""Which event loop an agent runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from allreduced.core.errors import ConfigError

AUTO_LOOP: Final = "asyncio"
"""What ``loop = "auto"`` means. No difference to uvloop was measured; this one is always there."""


def loop_factory(choice: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes the loop that the setting ``agent.loop`` asks for.

    :raises ConfigError: it is not installed.
    """
    if (AUTO_LOOP if choice == "auto" else choice) == "asyncio":
        return asyncio.new_event_loop
    try:
        import uvloop
    except ImportError:
        if choice == "auto":
            return asyncio.new_event_loop
        raise ConfigError(
            "uvloop is not installed", path="agent.loop", hint="pip install 'allreduced[agent]'"
        ) from None
    return uvloop.new_event_loop
