"""How an operation fails on all members alike: each of them says one last word, and all judge the same words.

Nobody can have a result without a member that was never ready, so that one may fail an operation at once, on all. Any
other may only ask: it stops delivering and says Abort. Who has delivered by then answers Kept, and all deliver; else
everybody says Abort, and when all have said it, all fail with the same error.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from allreduced.core.errors import AllReducedError, from_wire, to_wire
from allreduced.daemon.engine import wording
from allreduced.daemon.engine.actions import GiveUp, SendFrame
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.ending import Ending
from allreduced.daemon.engine.group import Group
from allreduced.daemon.engine.operation import ENDED, Operation, State, Verdict
from allreduced.daemon.engine.timers import Timed, Timers
from allreduced.protocol.peer import Abort, Kept, OperationFrame

PATIENCE = 1 / 4
"""Part of the failure timeout for which frames that make no sense are not held against a peer."""

READY_OUT = (State.READY, State.WITHDRAWING, State.RUNNING, State.BROKEN)
"""Another member may have a result: it may hold the READY of this one."""


def chosen(words: Mapping[int, AllReducedError]) -> AllReducedError:
    """Return the error that all members give: of all words, by member, that of the lowest."""
    return words[min(words)]


class LastWords:
    """Fails operations: at once where nobody can have a result, else when all members have said so."""

    def __init__(self, context: Context, ending: Ending, timers: Timers[Timed]) -> None:
        self._context = context
        self._ending = ending
        self._timers = timers

    def fail(self, operation: Operation, error: AllReducedError, *, final: bool = False, broken: bool = False) -> None:
        """Let the operation end with ``error``, on all members, unless one of them has delivered it.

        ``final``: it is known that nobody can have a result. ``broken``: what a peer sent makes no sense, so that what
        is under way cannot give one here. Frames may have been lost with a link: then the end of the generation is
        near, and mends it. So this waits a while.
        """
        if operation.state in ENDED:
            return
        if operation.peers:
            verdict = operation.verdict
            if broken:
                self._spoiled(operation, error)
                return
            if operation.group.frozen:
                operation.doomed = operation.doomed or error
                return
            if verdict is not None and verdict.kept:
                return
            if not final and operation.state in READY_OUT:
                self._say(operation, error)
                return
        self._ending.end(operation, error, tell=True)

    def abort_came(self, group: Group, peer: int, frame: Abort, operation: Operation | None) -> None:
        """Take the word of another member that wants the operation to fail. ``operation``: in flight or ended."""
        key = (frame.name, frame.use)
        if operation is None:
            if not group.over(key):
                self._failed_before(group, frame)
            else:
                self.answer(group, peer, frame)
        elif operation.state is State.DELIVERED:
            if frame.final:
                self._context.counters["frames_ignored"] += 1
            elif operation.verdict is None:
                operation.verdict = Verdict()
                operation.verdict.kept = True
                self._tell(group, Kept(group.number, group.generation, frame.name, frame.use))
        elif operation.state is State.FAILED:
            self.answer(group, peer, frame)
        else:
            self._heed(operation, peer, frame)

    def kept_came(self, operation: Operation) -> None:
        """Take the word of a member that has delivered the operation: this one must, too."""
        if operation.state not in READY_OUT:
            self._context.counters["frames_ignored"] += 1
            return
        verdict = operation.verdict = operation.verdict or Verdict()
        verdict.kept = True
        if operation.state is State.BROKEN and not operation.group.frozen:
            self.give_up(operation)
        elif operation.done:
            self._ending.deliver(operation)

    def answer(self, group: Group, peer: int, frame: OperationFrame) -> None:
        """Tell a member that does not know it that the operation of its frame failed here, if it did.

        Whoever says that itself is not answered.
        """
        failure = group.failures.get((frame.name, frame.use))
        if failure is None or isinstance(frame, Kept) or (isinstance(frame, Abort) and frame.final):
            self._context.counters["frames_ignored"] += 1
            return
        abort = Abort(group.number, group.generation, frame.name, frame.use, to_wire(failure[1]))
        self._context.out.append(SendFrame(group.members[peer].node, abort))

    def overdue(self, operation: Operation, error: AllReducedError) -> None:
        """Fail an operation whose deadline has passed; give this member up where it has not ended a while after it."""
        now, end = self._context.now, operation.deadline + self._context.limits.failure_timeout
        if now < operation.deadline:
            if operation.spoiled is not None and not operation.group.frozen:
                self.fail(operation, operation.spoiled)
            end = operation.deadline
        elif now >= end:
            self.give_up(operation)
            end = now + self._context.limits.failure_timeout
        else:
            self.fail(operation, operation.spoiled or error)
        if operation.state not in ENDED and end < inf:
            self._timers.set(operation, end)

    def give_up(self, operation: Operation) -> None:
        """Take this member out of the group: it cannot end the operation as the others do, or does not know how."""
        verdict = operation.verdict
        error = (
            chosen(verdict.words) if verdict is not None and verdict.words else operation.doomed or operation.spoiled
        )
        group = operation.group.number
        self._context.out.append(GiveUp(group, wording.cut_off(operation, self._context.node, error)))

    def departed(self, operation: Operation) -> None:
        """Take note that a member departed: its word is not waited for any more."""
        verdict = operation.verdict
        if verdict is not None and operation.group.mine in verdict.words:
            self._weigh(operation, verdict)

    def _heed(self, operation: Operation, peer: int, frame: Abort) -> None:
        group, error = operation.group, from_wire(frame.error)
        verdict = operation.verdict
        if verdict is not None and (verdict.kept or (peer in verdict.words and not frame.final)):
            self._context.counters["frames_ignored"] += 1
        elif frame.final:
            if group.frozen:
                operation.doomed = operation.doomed or error
            else:
                self._ending.end(operation, error, tell=False)
        else:
            verdict = operation.verdict = verdict or Verdict()
            verdict.words[peer] = error
            if group.mine in verdict.words:
                self._weigh(operation, verdict)
            else:
                self.fail(operation, error)

    def _spoiled(self, operation: Operation, error: AllReducedError) -> None:
        verdict = operation.verdict
        if operation.state is State.RUNNING:
            operation.state = State.BROKEN
            self._ending.cancel_receives(operation)
        if operation.spoiled is None:
            operation.spoiled = error
            limits = self._context.limits
            self._timers.sooner(operation, self._context.now + limits.failure_timeout * PATIENCE)
        if verdict is not None and verdict.kept and not operation.group.frozen:
            self.give_up(operation)

    def _say(self, operation: Operation, error: AllReducedError) -> None:
        group = operation.group
        verdict = operation.verdict = operation.verdict or Verdict()
        if group.mine in verdict.words:
            return
        verdict.words[group.mine] = error
        abort = Abort(group.number, group.generation, operation.name, operation.use, to_wire(error), final=False)
        self._tell(group, abort)
        self._weigh(operation, verdict)

    def _weigh(self, operation: Operation, verdict: Verdict) -> None:
        group = operation.group
        if len(group.departed.union(verdict.words)) == len(group.members):
            error = chosen(verdict.words)
            if group.frozen:
                operation.doomed = operation.doomed or error
            else:
                self._ending.end(operation, error, tell=False)

    def _failed_before(self, group: Group, frame: Abort) -> None:
        """Take note of the end of an operation that nobody has called here."""
        context, key = self._context, (frame.name, frame.use)
        error = from_wire(frame.error)
        context.counters["aborts_early"] += 1
        waiting = set(group.ranks) - group.left
        bound = context.limits.operations * len(group.members)
        group.ended_before(key, context.now, error, waiting, bound=bound)
        if not frame.final:
            self._tell(group, Abort(group.number, group.generation, frame.name, frame.use, frame.error))

    def _tell(self, group: Group, frame: Abort | Kept) -> None:
        for node, _ in group.others:
            self._context.out.append(SendFrame(node, frame))
