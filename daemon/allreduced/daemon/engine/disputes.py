"""Ranks that called one operation differently: all of them get one error, which names all of them."""

from __future__ import annotations

from math import inf
from operator import itemgetter

from allreduced.daemon.engine import wording
from allreduced.daemon.engine.actions import SendFrame
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.operation import STARTED, Operation
from allreduced.daemon.engine.timers import Timed, Timers
from allreduced.daemon.engine.verdict import LastWords
from allreduced.protocol.peer import Differs, Fingerprint

DISPUTE_SECONDS = 1.0
"""How long to wait, where calls differ, for ranks that did not call yet: an error that names all shows who is wrong."""


class Disputes:
    """Finds calls that differ, tells the others, and fails the operation: nobody can have a result of it."""

    def __init__(self, context: Context, words: LastWords, timers: Timers[Timed]) -> None:
        self._context = context
        self._words = words
        self._timers = timers

    def disagrees(self, operation: Operation, fingerprint: Fingerprint) -> bool:
        """Return whether this is another call than was known; the first one is taken note of."""
        known = operation.fingerprint
        if known is None:
            operation.fingerprint = fingerprint
            return False
        return known is not fingerprint and known != fingerprint

    def dispute(self, operation: Operation) -> None:
        """Tell the others that calls differ, and fail as soon as all are known, or in a while."""
        group, now = operation.group, self._context.now
        if operation.disputed == inf:
            operation.disputed = min(now + DISPUTE_SECONDS, operation.deadline)
            self._timers.sooner(operation, operation.disputed)
        frame = Differs(group.number, group.generation, operation.name, operation.use, operation.calls())
        for node, _ in group.others:
            self._context.out.append(SendFrame(node, frame))
        self.settle(operation)

    def differs(self, operation: Operation, peer: int, frame: Differs) -> None:
        """Take what ranks of a peer called."""
        group = operation.group
        ranks = group.members[peer].ranks
        told = [rank for call in frame.calls for rank in call.ranks]
        if operation.state in STARTED or len(set(told)) < len(told) or not set(told) <= set(ranks):
            node = group.members[peer].node
            self._words.fail(operation, wording.bad_frame(operation, node, "says that its ranks disagree"), broken=True)
            return
        operation.peers[peer].calls = frame.calls
        if operation.disputed == inf:
            self.dispute(operation)
        else:
            self.settle(operation)

    def settle(self, operation: Operation, *, now: bool = False) -> None:
        """Fail the operation if all calls are known, or (``now``) with those that are."""
        known = _fingerprints(operation)
        if (now or len(known) == operation.group.size) and len({fingerprint for _, fingerprint in known}) > 1:
            self._words.fail(operation, wording.mismatch(operation, known), final=True)


def _fingerprints(operation: Operation) -> list[tuple[int, Fingerprint]]:
    pairs = [(submit.rank, submit.fingerprint) for submit in operation.submits if submit is not None]
    for member, view in zip(operation.group.members, operation.peers, strict=False):
        if view.fingerprint is not None:
            pairs += [(rank, view.fingerprint) for rank in member.ranks]
        else:
            pairs += [(rank, call.fingerprint) for call in view.calls for rank in call.ranks]
    return sorted(pairs, key=itemgetter(0))
