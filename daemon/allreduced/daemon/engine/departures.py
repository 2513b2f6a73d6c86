"""Ranks that left and agents that stopped, in order: no generation ends, but some operations cannot end well.

What a rank submitted before it left stays valid, and an agent that stops first does its part in what was under way.
"""

from __future__ import annotations

from allreduced.daemon.engine import wording
from allreduced.daemon.engine.group import Group
from allreduced.daemon.engine.operation import Operation
from allreduced.daemon.engine.verdict import READY_OUT, LastWords


class Departures:
    """Fails the operations that need more of who is gone."""

    def __init__(self, words: LastWords) -> None:
        self._words = words

    def check(self, operation: Operation) -> bool:
        """Fail an operation that lacks a rank which left, or an agent that stopped; return whether it did."""
        group = operation.group
        missing = tuple(rank for rank in operation.missing_ranks() if rank in group.left)
        if missing:
            self._words.fail(operation, wording.rank_left(operation, missing), final=True)
            return True
        if group.departed and operation.state not in READY_OUT:
            # They called it, but an agent that stopped does its part in nothing that begins.
            stopped = tuple(member for member in sorted(group.departed) if _left(group, member))
            if stopped:
                self._words.fail(operation, wording.node_left(operation, stopped), final=True)
                return True
        return False

    def departed(self, group: Group, member: int) -> None:
        """Take note that a member takes part in nothing any more."""
        if not _left(group, member):
            return
        for operation in list(group.operations.values()):
            if operation.state in READY_OUT:
                execution = operation.execution
                unserved = execution.unserved() if execution is not None else ()
                if operation.peers[member].ready is None or member in unserved:
                    self._words.fail(operation, wording.node_left(operation, (member,)), broken=True)
                self._words.departed(operation)
            else:
                self.check(operation)


def _left(group: Group, member: int) -> bool:
    """Tell whether all ranks of a member left on purpose, so that its departure is no loss."""
    return group.left.issuperset(group.members[member].ranks)
