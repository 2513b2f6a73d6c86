"""What is done to a running job: the kinds of faults, how each is done, and what the job must do then."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

SHORT = 0.4
"""A fault that must be survived lasts this share of the failure timeout."""


class Kind(enum.Enum):
    """What is done. ``node`` and ``other`` are nodes, ``rank`` a rank."""

    KILL_RANK = "a rank is killed"
    KILL_AGENT = "an agent is killed"
    PAUSE_RANK = "a rank is stopped for a moment"
    PAUSE_AGENT = "an agent is stopped for a moment"
    STOP_RANK = "a rank is stopped past the deadline"
    STOP_AGENT = "an agent is stopped past the failure timeout"
    RESET = "the connections of two agents are reset"
    CUT = "the connections of two agents are reset for a while"
    HALF_OPEN = "one side of all connections of two agents is reset"
    HOLE = "nothing passes between two agents for a moment"
    HOLE_ONE_WAY = "nothing passes from one agent to another for a moment"
    DEAF = "nothing passes from one agent to another any more"
    ISOLATE = "nothing passes between an agent and all others any more"
    PULL_CABLE = "the cable of a node is pulled for a moment"
    DOWN = "the interface of a node is down for a moment"
    PULL_CABLE_LONG = "the cable of a node is pulled"
    DOWN_LONG = "the interface of a node is down"


ON_PROCESSES = (Kind.KILL_RANK, Kind.KILL_AGENT, Kind.PAUSE_RANK, Kind.PAUSE_AGENT, Kind.STOP_AGENT)
ON_PROXIES = (Kind.RESET, Kind.CUT, Kind.HALF_OPEN, Kind.HOLE, Kind.HOLE_ONE_WAY, Kind.DEAF, Kind.ISOLATE)
ON_CABLES = (Kind.PULL_CABLE, Kind.DOWN, Kind.PULL_CABLE_LONG, Kind.DOWN_LONG)

RESTORED_CUTS = frozenset({Kind.RESET, Kind.CUT, Kind.HALF_OPEN})
MOMENTS = frozenset({Kind.PAUSE_RANK, Kind.PAUSE_AGENT, Kind.HOLE, Kind.HOLE_ONE_WAY, Kind.PULL_CABLE, Kind.DOWN})
SILENCES = frozenset({Kind.STOP_AGENT, Kind.DEAF, Kind.ISOLATE, Kind.PULL_CABLE_LONG, Kind.DOWN_LONG})
CUTS_OFF = frozenset({Kind.STOP_AGENT, Kind.ISOLATE, Kind.PULL_CABLE_LONG, Kind.DOWN_LONG})
"""Faults after which one node is alone."""


@dataclass(frozen=True)
class Fault:
    """One fault. ``seconds``: how long it lasts; 0 until those that it does not hit have given up the others."""

    kind: Kind
    node: int
    other: int = -1
    rank: int = -1
    seconds: float = 0.0

    def __str__(self) -> str:
        places = (f"node {self.node}", f"node {self.other}" if self.other >= 0 else "", f"rank {self.rank}")
        return f"{self.kind.value} ({', '.join(place for place in places if place and not place.endswith('-1'))})"


@dataclass(frozen=True)
class Expectation:
    """What must come of a fault.

    ``survives``: nobody gets an error. Else ``spared`` are the ranks that must agree and have an error of class
    ``code`` within ``bound`` seconds of the fault, and ``cut_off`` those that must have one within ``late_bound``
    of its end. The error names at least one of ``nodes`` and no other, and one of ``ranks`` if there are any.
    """

    survives: bool
    spared: frozenset[int] = frozenset()
    cut_off: frozenset[int] = frozenset()
    code: str = ""
    bound: float = 0.0
    late_bound: float = 0.0
    nodes: frozenset[int] = frozenset()
    ranks: frozenset[int] = frozenset()


def expectation(fault: Fault, places: Sequence[int], *, failure_timeout: float, deadline: float) -> Expectation:
    """Return what a job with ranks at ``places`` must do after ``fault``. Bounds are without the slack of a machine."""
    everyone = frozenset(range(len(places)))
    of_node = frozenset(rank for rank in everyone if places[rank] == fault.node)
    kind = fault.kind
    if kind in MOMENTS or kind in RESTORED_CUTS:
        return Expectation(survives=True)
    if kind is Kind.KILL_RANK:
        lost = frozenset({fault.rank})
        return Expectation(False, everyone - lost, code="rank_lost", nodes=frozenset({fault.node}), ranks=lost)
    if kind is Kind.STOP_RANK:
        lost = frozenset({fault.rank})
        bound = deadline + failure_timeout
        return Expectation(
            False, everyone - lost, lost, "deadline_exceeded", bound, bound + deadline, frozenset(), lost
        )  # fmt: skip
    if kind is Kind.KILL_AGENT:
        return Expectation(False, everyone - of_node, code="peer_lost", nodes=frozenset({fault.node}), ranks=of_node)
    if kind in CUTS_OFF:
        nodes = len(set(places))
        # Of two nodes the one with rank 0 decides; the other one must first give up that there will be a decision.
        decide = nodes > 2 or fault.node != places[0]
        return Expectation(
            False,
            everyone - of_node,
            of_node,
            "peer_lost",
            failure_timeout if decide else 2 * failure_timeout,
            2 * failure_timeout,
            frozenset({fault.node}),
            of_node,
        )
    # One pair of agents: either may be held to be lost, by itself too.
    pair = frozenset({fault.node, fault.other})
    return Expectation(False, everyone, code="peer_lost", bound=2 * failure_timeout, nodes=pair)


def fault_of(kind: Kind, rng: random.Random, places: Sequence[int], failure_timeout: float) -> Fault:
    """Return a fault of this kind, with everything else about it drawn from ``rng``."""
    rank = rng.randrange(len(places))
    node = places[rank]
    other = rng.choice([place for place in set(places) if place != node])
    lasts = SHORT * failure_timeout if kind in MOMENTS or kind is Kind.CUT else 0.0
    on_rank = kind in (Kind.KILL_RANK, Kind.PAUSE_RANK, Kind.STOP_RANK)
    on_pair = kind in (*RESTORED_CUTS, Kind.HOLE, Kind.HOLE_ONE_WAY, Kind.DEAF)
    return Fault(kind, node, other if on_pair else -1, rank if on_rank else -1, lasts)
