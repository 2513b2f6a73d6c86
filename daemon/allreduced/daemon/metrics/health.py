"""What /healthz and /readyz say. Pure decisions."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from allreduced.daemon.metrics.loop_lag import PERIOD

TOO_LATE = 20 * PERIOD
"""Seconds without progress of the event loop after which the agent is not healthy, but see :func:`unhealthy`."""


class Phase(enum.Enum):
    """Where an agent is in its life; it only moves down this list."""

    STARTING = "the agent is starting"
    SERVING = "serving"
    DRAINING = "the agent is stopping"


def unhealthy(since: float, failure_timeout: float) -> str:
    """Return why the event loop does not make progress; empty where it does.

    ``since``: seconds since the loop last called a timer that is due ten times a second. An agent that is held up for
    its failure timeout is dead for its peers, so nothing above that is healthy; below two seconds everything is.
    """
    if since <= max(TOO_LATE, failure_timeout):
        return ""
    return f"the event loop was held up for {since:.1f} s"


def not_ready(phase: Phase, never_reached: Sequence[str], up: int, lost: Sequence[str]) -> tuple[str, ...]:
    """Return why the agent is not ready, a line each; nothing where it is.

    ``never_reached``: listed peers to which there was never a link; ``up``: how many peers have one now; ``lost``:
    those that had one. Losing some of several peers is what the agents are there for, so it needs none of them back; an
    agent without any is cut off.
    """
    if phase is not Phase.SERVING:
        return (phase.value,)
    reasons = [f"peer never reached: {address}" for address in never_reached]
    if lost and not up:
        reasons += [f"no peer is reached any more, {', '.join(lost)} neither"]
    return tuple(reasons)
