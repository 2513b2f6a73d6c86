"""Ballots: what keeps two proposers from deciding differently.

This is single-decree Paxos (Lamport, "The Part-Time Parliament", 1998), once for each generation of a group.
A member that promised a ballot takes part in no lower one; a proposer takes over what the highest ballot among the
promises of a quorum had accepted. So whatever a quorum accepted once is what every later ballot proposes again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from allreduced.protocol.change import Accept, Accepted, Change, Prepare, Promise


class Ballot(NamedTuple):
    """One attempt of one proposer (its place among the members) to end a generation. Ordered, and never used twice."""

    generation: int
    attempt: int
    proposer: int


NONE = Ballot(0, 0, 0)
"""Lower than any ballot."""


def ballot_of(frame: Prepare | Promise | Accept | Accepted) -> Ballot:
    """Return the ballot that a frame belongs to."""
    return Ballot(frame.generation, frame.attempt, frame.proposer)


def may_promise(promised: Ballot, ballot: Ballot) -> bool:
    """Tell whether a member that ``promised`` may promise ``ballot``. The same one again is the same promise."""
    return ballot >= promised


def may_accept(promised: Ballot, ballot: Ballot) -> bool:
    """Tell whether a member that ``promised`` may accept the change of ``ballot``."""
    return ballot >= promised


def chosen(promises: Iterable[Promise]) -> Change | None:
    """Return the change that the proposer must propose: that of the highest ballot. None: it is free to make one."""
    accepted = [promise for promise in promises if promise.accepted]
    if not accepted:
        return None
    highest = max(accepted, key=lambda promise: (promise.accepted_attempt, promise.accepted_proposer))
    return highest.accepted[0]


@dataclass(slots=True)
class Acceptor:
    """What one member promised and accepted in one generation."""

    promised: Ballot = NONE
    accepted_in: Ballot = NONE
    accepted: Change | None = None

    def promise(self, ballot: Ballot) -> bool:
        """Promise to take part in no lower ballot; False where a higher one was promised."""
        if not may_promise(self.promised, ballot):
            return False
        self.promised = ballot
        return True

    def accept(self, ballot: Ballot, change: Change) -> bool:
        """Accept the change of a ballot; False where a higher one was promised."""
        if not may_accept(self.promised, ballot):
            return False
        self.promised = self.accepted_in = ballot
        self.accepted = change
        return True
