"""The end of a generation in the engine: nothing is delivered while the members agree, then all do what they agreed.

What was delivered anywhere and may be missing somewhere is a result of the change: who lacks it fetches it from one
that holds it. What failed anywhere fails everywhere. Everything else fails with the losses where the group has ended;
else it starts again from its inputs, as soon as nothing that belongs to the old generation uses its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from allreduced.core.errors import AllReducedError, from_wire, to_wire
from allreduced.core.identity import Member
from allreduced.daemon.engine import wording
from allreduced.daemon.engine.actions import Frozen, GiveUp
from allreduced.daemon.engine.admission import Admission
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.ending import Ending
from allreduced.daemon.engine.events import Submitted
from allreduced.daemon.engine.fetch import Fetching
from allreduced.daemon.engine.group import Group
from allreduced.daemon.engine.operation import Operation, State, Verdict
from allreduced.daemon.engine.plan import plan_for
from allreduced.daemon.engine.timers import Timed, Timers
from allreduced.daemon.engine.verdict import LastWords
from allreduced.daemon.losses import error_of
from allreduced.protocol.change import MAX_FAILURES, Change, Failure, Result


def at_rest(operation: Operation) -> bool:
    """Tell whether nothing reads or writes the operation's memory any more, so that it may be used again."""
    return operation.outstanding == 0


class Changing:
    """Freezes generations and installs what their members agreed on."""

    def __init__(
        self,
        context: Context,
        admission: Admission,
        ending: Ending,
        words: LastWords,
        fetching: Fetching,
        timers: Timers[Timed],
    ) -> None:
        self._context = context
        self._admission = admission
        self._ending = ending
        self._words = words
        self._fetching = fetching
        self._timers = timers

    def freeze(self, group: Group, generation: int) -> None:
        """Deliver and fail nothing more in this generation; tell what there is of it."""
        if group.cut_off or generation != group.generation:
            self._context.counters["events_ignored"] += 1
            return
        group.frozen = True
        results = tuple(
            Result(name, use, (group.mine,))
            for (name, use), operation in group.ending.items()
            if operation.state is State.DELIVERED and operation.unconfirmed
        )
        recent = self._context.now - 2 * self._context.limits.failure_timeout
        failures = [
            Failure(name, use, to_wire(error)) for (name, use), (at, error) in group.failures.items() if at >= recent
        ]
        forgetting = group.forgetting
        self._context.out.append(
            Frozen(
                group.number,
                generation,
                results,
                tuple(failures[-MAX_FAILURES:]),
                forgetting.decided,
                forgetting.refused,
            )
        )

    def cut_off(
        self, group: Group, error: AllReducedError, failures: Mapping[tuple[str, int], AllReducedError] | None = None
    ) -> None:
        """End the group on this node only: nothing more is agreed with the others."""
        known = failures or {}
        group.cut_off = True
        group.frozen = False
        group.error = group.error or error
        group.outcomes.clear()
        for operation in list(group.operations.values()):
            self._ending.end(operation, known.get(operation.key, error), tell=False)
        for operation in list(group.ending.values()):
            if operation.unconfirmed:
                group.doubtful[operation.key] = operation.unconfirmed
                operation.unconfirmed = 0
            self._ending.settle(operation)

    def install(self, group: Group, generation: int, change: Change) -> list[Submitted]:
        """Do what the members of ``generation`` agreed on; returns submits that were held up and can go on."""
        if generation < group.generation:
            self._context.counters["events_ignored"] += 1
            return []
        node = group.me.node
        mine = next((place for place, member in enumerate(change.members) if member.node == node), -1)
        failures = {(failure.name, failure.use): from_wire(failure.error) for failure in change.failures}
        diverged = self._diverged(group, change)
        follows = mine >= 0 and generation == group.generation and not group.cut_off
        if follows and not change.ended and change.members[mine].ranks != group.ranks:
            follows = False  # a rank of this node is gone and the group goes on: nobody decides so yet
        if not follows or diverged:
            if diverged:
                group.error = wording.diverged(group, diverged)
                self._context.out.append(GiveUp(group.number, group.error))
            group.generation = change.generation
            self.cut_off(group, group.error or error_of(change.losses), failures)
            return []
        return self._begin(group, change, mine, failures)

    def rested(self, operation: Operation) -> None:
        """Go on with an operation of the last generation if nothing uses its memory any more."""
        if operation.state is State.FETCHING:
            if at_rest(operation):
                self._fetching.fetch(operation)
        elif operation.state is State.RESTARTING and at_rest(operation):
            self._ending.release(operation)
            self._context.freed = True
            self._admission.admit(operation)

    def _diverged(self, group: Group, change: Change) -> list[tuple[str, int]]:
        """Return what was delivered here and none of the others that go on has, who do not give it to their ranks."""
        going = 0
        for member in change.members:
            place = group.member_of.get(member.node)
            if place is not None:
                going |= 1 << place
        if not going:
            return []
        results = {(result.name, result.use) for result in change.results}
        unconfirmed = group.doubtful | {key: operation.unconfirmed for key, operation in group.ending.items()}
        return [key for key, mask in unconfirmed.items() if mask & going == going and key not in results]

    def _begin(
        self, group: Group, change: Change, mine: int, failures: Mapping[tuple[str, int], AllReducedError]
    ) -> list[Submitted]:
        nodes = [member.node for member in change.members]
        results = {
            (result.name, result.use): [
                group.members[place].node
                for place in result.holders
                if place < len(group.members) and group.members[place].node in nodes
            ]
            for result in change.results
        }
        held = group.forgetting.settle(change.round, change.refused)
        in_flight, complete = list(group.operations.values()), set()
        for operation in in_flight:
            if operation.done:
                complete.add(operation)
            elif operation.missing == 0:
                operation.state = State.RESTARTING  # none of them gets memory before all are known
            self._ending.stop(operation)
        for operation in group.ending.values():
            self._ending.stop(operation)
        before = group.members
        group.adopt(change, mine)
        error = error_of(change.losses)
        if change.ended:
            group.error = group.error or error
            group.outcomes.clear()
        keeper = group.keeper
        keeper.begin()
        for operation in list(group.ending.values()):
            if operation.state is State.DELIVERED:
                operation.unconfirmed = 0
                if operation.key in results:
                    keeper.agree(operation)
            self._ending.settle(operation)
        for operation in in_flight:
            if operation.key in results:
                operation.begin_again(before)
                if operation.missing == 0:
                    keeper.agree(operation)
        if results:
            keeper.begun()
        for operation in in_flight:
            holders = results.get(operation.key)
            if holders is not None:
                self._take_result(operation, holders, complete=operation in complete)
            elif operation.key in failures:
                self._ending.end(operation, failures[operation.key], tell=False)
            elif change.ended:
                self._ending.end(operation, error, tell=False)
            else:
                self._restart(operation, before)
        return held

    def _take_result(self, operation: Operation, holders: list[str], *, complete: bool) -> None:
        """Let an operation end with the result that a member has."""
        operation.verdict = Verdict()
        operation.verdict.kept = True
        if operation.missing:
            self._words.give_up(operation)  # nobody can have a result without these
        elif complete or operation.plan is None or not operation.plan.nbytes:
            operation.state = State.RUNNING
            self._ending.deliver(operation)
        else:
            operation.state = State.FETCHING
            operation.holders = holders
            self.rested(operation)

    def _restart(self, operation: Operation, before: Sequence[Member]) -> None:
        """Begin again, as if the last local rank had just come."""
        doomed = operation.doomed
        operation.begin_again(before)
        if operation.missing == len(operation.submits):
            operation.fingerprint = operation.plan = None
            if not any(view.ranks for view in operation.peers):  # those who told of it will do so again
                operation.wake = inf
                del operation.group.operations[operation.key]
            return
        now = self._context.now
        if operation.deadline < inf:
            self._timers.set(operation, max(now, now + min(1.0, (operation.deadline - now) / 2)))
        if operation.group.mine == 0 and operation.submits[0] is not None and not operation.stamp:
            self._context.clock += 1
            operation.stamp = (-operation.submits[0].priority, self._context.clock, 0)
        calls = [(submit.rank, submit.fingerprint) for submit in operation.submits if submit is not None]
        if any(fingerprint != calls[0][1] for _, fingerprint in calls):
            self._words.fail(operation, wording.mismatch(operation, calls))
            return
        operation.fingerprint = calls[0][1]
        operation.plan = plan_for(operation.group, operation.fingerprint)
        error = doomed or operation.plan.error
        if error is not None:
            self._words.fail(operation, error)
        elif operation.missing == 0:
            operation.state = State.RESTARTING
            self.rested(operation)
