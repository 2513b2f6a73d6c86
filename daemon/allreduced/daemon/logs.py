"""Logging of the agent, set up in one place: one line of ``key=value`` per event, on standard error."""

from __future__ import annotations

import logging
import sys


def configure(level: str, node: str) -> None:
    """Log ``allreduced.*`` from ``level`` on, everything else from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    name = node.replace("%", "%%")
    handler.setFormatter(
        logging.Formatter(
            f"%(asctime)s.%(msecs)03d %(levelname)s node={name} %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_level(level)


def set_level(level: str) -> None:
    """Log ``allreduced.*`` from ``level`` on from now on."""
    logging.getLogger("allreduced").setLevel(level.upper())
