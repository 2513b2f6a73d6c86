"""The numbers of the engine, for metrics: few, whatever is in flight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from allreduced.core.identity import GroupKey
from allreduced.daemon.engine.group import Group
from allreduced.daemon.histogram import Histogram


@dataclass(frozen=True, slots=True)
class GroupReading:
    """One group on this node. ``size``: ranks of the current generation. ``in_flight``: operations.

    ``oldest``: seconds since the first sign of the oldest of them, 0 where there is none; ``awaited``: local ranks that
    have not called that one. ``lateness``: local rank, its calls, seconds of lateness of all of them; ``skew``: by
    operation.
    """

    key: GroupKey
    generation: int
    size: int
    in_flight: int
    oldest: float
    awaited: tuple[int, ...]
    lateness: tuple[tuple[int, int, float], ...]
    skew: Histogram


@dataclass(frozen=True, slots=True)
class Reading:
    """The whole engine. ``groups``: the oldest ones, of ``group_count``; sizes in bytes."""

    groups: tuple[GroupReading, ...]
    group_count: int
    reserved_bytes: int
    lease_bytes: int


def take_reading(groups: Iterable[Group], count: int, most: int, now: float, *, reserved: int, leased: int) -> Reading:
    """Return the numbers of at most ``most`` of ``count`` groups; changes nothing."""
    return Reading(tuple(_group(group, now) for group in islice(groups, most)), count, reserved, leased)


def _group(group: Group, now: float) -> GroupReading:
    late = group.lateness
    oldest = next(iter(group.operations.values()), None)
    here = oldest.arrived_ranks() if oldest is not None else ()
    return GroupReading(
        group.key,
        group.generation,
        group.size,
        len(group.operations),
        now - oldest.known if oldest is not None else 0.0,
        tuple(rank for rank in group.ranks if rank not in here and rank not in group.left)
        if oldest is not None
        else (),
        tuple(zip(group.ranks, late.calls, late.seconds, strict=True)),
        late.skew.copy(),
    )
