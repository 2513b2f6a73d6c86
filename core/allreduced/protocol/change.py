"""Control frames about the end of a generation of a group: one decision of all its members, see docs/failure.md.

``generation`` of a frame is the one that ends. How frames become bytes is in ``peer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from allreduced.core.errors import WireError
from allreduced.core.identity import Members
from allreduced.core.limits import MAX_RANKS, U32, AtMost, Id, Name, Rank, Ranks

MAX_RESULTS = 1 << 12
"""Results of one group that members may keep for each other at most (a count)."""

MAX_RESULT_NAMES = 256 << 10
"""Bytes of the names of all these results at most, so that a :class:`Promise` fits a frame."""

MAX_FAILURES = 64
"""Failed operations that one :class:`Promise` tells at most."""

MAX_FORGET = 1024
"""Names of operations that one round of forgetting is about at most."""

Uses: TypeAlias = Annotated[tuple[Id, ...], AtMost(MAX_FORGET)]


@dataclass(frozen=True, slots=True)
class Loss:
    """Ranks of ``node`` that are lost, and why. ``whole``: the node is lost with all its ranks, not single processes.

    ``proven``: its agent is known to be dead, or said goodbye; else it was only silent.
    """

    node: Name
    ranks: Ranks
    whole: bool
    proven: bool
    error: WireError


@dataclass(frozen=True, slots=True)
class Result:
    """An operation that was delivered, and which members (places in the generation that ends) hold its result."""

    name: Name
    use: Id
    holders: Ranks


@dataclass(frozen=True, slots=True)
class Failure:
    """An operation that ended with an error on every member."""

    name: Name
    use: Id
    error: WireError


Losses: TypeAlias = Annotated[tuple[Loss, ...], AtMost(MAX_RANKS)]
Results: TypeAlias = Annotated[tuple[Result, ...], AtMost(MAX_RESULTS)]
Failures: TypeAlias = Annotated[tuple[Failure, ...], AtMost(MAX_FAILURES)]


@dataclass(frozen=True, slots=True)
class Change:
    """What all members of a generation agree on at its end.

    ``generation``: the next one. ``members``: those that go on, with the ranks that they still hold. ``losses``: who
    does not and why; with none, all go on. ``ended``: the group runs nothing more (its policy), only what is in doubt
    is settled. ``left``: ranks that left on purpose. ``results``: operations that every member that goes on gives to
    its ranks. ``failures``: operations that ended with an error. Everything else that is in flight fails with the
    losses where ``ended``, or starts again. ``round``, ``refused``: rounds of forgetting that are decided, and what was
    refused in the last of them.
    """

    generation: U32
    members: Members
    losses: Losses
    ended: bool
    left: Ranks
    results: Results
    failures: Failures
    round: U32
    refused: Uses


Changes: TypeAlias = Annotated[tuple[Change, ...], AtMost(1)]


@dataclass(frozen=True, slots=True)
class Trouble:
    """The sender knows why the generation cannot go on: losses, or (with none) frames that may be lost."""

    group: Id
    generation: U32
    losses: Losses


@dataclass(frozen=True, slots=True)
class Prepare:
    """Phase one of the ballot (generation, attempt, proposer). ``proposer``: the sender's place among the members."""

    group: Id
    generation: U32
    attempt: U32
    proposer: Rank


@dataclass(frozen=True, slots=True)
class Promise:
    """Answer to Prepare: the sender takes part in no lower ballot, and delivers nothing more in this generation.

    ``accepted``: the change that it accepted in the ballot (``accepted_attempt``, ``accepted_proposer``), if any.
    The rest is what it knows: see Change. ``results``: those that it delivered and others may lack.
    """

    group: Id
    generation: U32
    attempt: U32
    proposer: Rank
    accepted_attempt: U32
    accepted_proposer: Rank
    accepted: Changes
    losses: Losses
    left: Ranks
    results: Results
    failures: Failures
    round: U32
    refused: Uses


@dataclass(frozen=True, slots=True)
class Accept:
    """Phase two of the ballot: accept this change."""

    group: Id
    generation: U32
    attempt: U32
    proposer: Rank
    change: Change


@dataclass(frozen=True, slots=True)
class Accepted:
    """Answer to Accept."""

    group: Id
    generation: U32
    attempt: U32
    proposer: Rank


@dataclass(frozen=True, slots=True)
class Committed:
    """A quorum accepted the change: it holds. Whoever learns it tells all others once."""

    group: Id
    generation: U32
    change: Change


ChangeFrame: TypeAlias = "Trouble | Prepare | Promise | Accept | Accepted | Committed"
