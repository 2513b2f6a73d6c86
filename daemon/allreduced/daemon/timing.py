"""All times of failure handling, derived from one knob, ``failure_timeout``. Nothing else of it can be set."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, get_type_hints

from allreduced.core.errors import ConfigError

SHORTEST = 0.2
"""Seconds of the shortest ``failure_timeout``: below it, the ordinary delays of a busy machine would be deaths."""

LONGEST = 3600.0
"""Seconds of the longest one."""

_FIRST_PAUSE = 0.05
_CONFIRM_DELAY = 20e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When what is done about failures, in seconds. Make it with :func:`derived`.

    :raises ConfigError: the times contradict each other.
    """

    failure_timeout: Annotated[float, "silence after which a peer is dead"]
    heartbeat: Annotated[float, "quiet after which a link gets a heartbeat; links are looked at this often"]
    tolerance: Annotated[float, "a look at the links that is later than this was held up, and the delay is forgiven"]
    connect: Annotated[float, "in which a dialled agent must answer, and again in which it must authenticate"]
    first_pause: Annotated[float, "between the first tries to reach an agent; it doubles from try to try"]
    longest_pause: Annotated[float, "between later ones"]
    stagger: Annotated[float, "by which the proposal of a change waits for that of each member before"]
    give_up: Annotated[float, "in which a change must be decided after the last loss that became known"]
    confirm: Annotated[float, "that a confirmation waits for a frame that can carry it"]

    def __post_init__(self) -> None:
        for name in (field.name for field in dataclasses.fields(self)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise _contradiction(f"{name} is {value}, and must be a positive number of seconds")
        limit = self.failure_timeout
        if not SHORTEST <= limit <= LONGEST:
            raise _contradiction(f"failure_timeout is {limit} s, and must be from {SHORTEST} to {LONGEST}")
        for name, most, why in (
            ("heartbeat", limit / 4, "several heartbeats must be lost before a peer is dead"),
            ("tolerance", limit / 8, "a stall of this agent must not look like the silence of a peer"),
            ("connect", limit / 2, "a peer whose link ended must be reached again before it counts as dead"),
            ("first_pause", self.longest_pause, "pauses only grow"),
            ("longest_pause", limit / 4, "a peer whose link ended must be dialled several times"),
            ("stagger", self.give_up / 4, "several members must have their turn before a change is given up"),
            ("confirm", self.heartbeat, "it is told with the next frames"),
        ):
            if getattr(self, name) > most:
                raise _contradiction(f"{name} is {getattr(self, name):g} s, at most {most:g} s are possible: {why}")
        if self.give_up < limit + self.tolerance:
            raise _contradiction("give_up is shorter than what it takes to notice that a peer is silent")

    def describe(self) -> tuple[str, ...]:
        """Return a line for each time: name, seconds, meaning."""
        hints = get_type_hints(type(self), include_extras=True)
        return tuple(
            f"{field.name} = {getattr(self, field.name):g} s: {hints[field.name].__metadata__[0]}"
            for field in dataclasses.fields(self)
        )


def heartbeat(failure_timeout: float) -> float:
    """Return the seconds of quiet after which an agent with this ``failure_timeout`` must be sent a heartbeat."""
    return max(failure_timeout, SHORTEST) / 8


def derived(failure_timeout: float, deadline: float = math.inf) -> Timing:
    """Return the times for a ``failure_timeout``. ``deadline``: the default one of operations.

    :raises ConfigError: it is out of range, or operations would be given up before a silent peer is found.
    """
    if deadline < failure_timeout:
        raise _contradiction(
            f"failure.deadline ({deadline:g} s) is shorter than failure.failure_timeout ({failure_timeout:g} s):"
            " every operation would be given up before a silent peer is found",
            "raise the one or lower the other",
        )
    return Timing(
        failure_timeout=failure_timeout,
        heartbeat=heartbeat(failure_timeout),
        tolerance=failure_timeout / 16,
        connect=failure_timeout / 2,
        first_pause=min(_FIRST_PAUSE, failure_timeout / 10),
        longest_pause=failure_timeout / 10,
        stagger=failure_timeout / 8,
        give_up=1.5 * failure_timeout,
        confirm=_CONFIRM_DELAY,
    )


def _contradiction(message: str, hint: str = "") -> ConfigError:
    return ConfigError(message, path="$.failure", hint=hint)
