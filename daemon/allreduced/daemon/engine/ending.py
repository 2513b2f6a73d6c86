"""How operations end on this node: with results, or with an error. Memory goes back when nothing uses it any more."""

from __future__ import annotations

import math

from allreduced.core.errors import AllReducedError, MismatchError, to_wire
from allreduced.daemon.engine import wording
from allreduced.daemon.engine.actions import CancelReceive, CancelSend, Deliver, Fail, SendFrame
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.freshness import is_fresh
from allreduced.daemon.engine.kept import must_keep
from allreduced.daemon.engine.leases import Holder, Leases
from allreduced.daemon.engine.memory import Memory
from allreduced.daemon.engine.operation import ENDED, Operation, State
from allreduced.protocol.peer import Abort


class Ending:
    """Delivers, fails, and settles what is outstanding."""

    def __init__(self, context: Context, memory: Memory, leases: Leases) -> None:
        self._context = context
        self._memory = memory
        self._leases = leases

    def end(self, operation: Operation, error: AllReducedError, *, tell: bool) -> None:
        """End the operation with ``error`` on this node, and (``tell``) on all others. Happens once per operation."""
        if operation.state in ENDED:
            return
        group, context = operation.group, self._context
        if tell and operation.peers:
            abort = Abort(group.number, group.generation, operation.name, operation.use, to_wire(error))
            for node, _ in group.others:
                context.out.append(SendFrame(node, abort))
        waiting = {
            rank
            for rank, submit in zip(group.ranks, operation.submits, strict=True)
            if submit is None and rank not in group.left
        }
        if group.error is not None:
            waiting.clear()
        group.ended_before(operation.key, context.now, error, waiting)
        operation.state = State.FAILED
        operation.error = error
        operation.unconfirmed = 0
        self._move_to_ending(operation)
        self.cancel_receives(operation)
        for number, sending in operation.sendings.items():
            context.out.append(CancelSend(number, sending.node))
        if operation.peers:
            group.keeper.forget(operation)
        context.counters["failed"] += 1
        if operation.parts:
            if isinstance(error, MismatchError):
                context.differing.append(operation)
            else:
                operation.parts = ()
        self.settle(operation)

    def cancel_receives(self, operation: Operation) -> None:
        """Close all posted receives; each counts as outstanding until ReceiveCancelled."""
        for number, posting in operation.postings.items():
            if not posting.cancelled:
                posting.cancelled = True
                operation.outstanding += 1
                self._context.out.append(CancelReceive(number, posting.node))
        fetched = operation.fetched
        if fetched is not None and not fetched.cancelled:
            fetched.cancelled = True
            operation.outstanding += 1
            self._context.out.append(CancelReceive(fetched.number, fetched.node))

    def stop(self, operation: Operation) -> None:
        """End all that is under way between members for an operation, for its generation ends."""
        self.cancel_receives(operation)
        for number, sending in operation.sendings.items():
            self._context.out.append(CancelSend(number, sending.node))
        execution, operation.execution = operation.execution, None
        if execution is not None:
            execution.dispose()

    def deliver(self, operation: Operation) -> None:
        """Give every local rank the result. Every tile is final and no input is read any more.

        Where others have a part in it, it waits until a quorum was heard recently; and nothing is delivered here while
        members agree on how it ends, or on the end of the generation: that decides.
        """
        context = self._context
        if operation.peers:
            verdict = operation.verdict
            if operation.group.frozen or (verdict is not None and not verdict.kept):
                return
            if not is_fresh(context, operation.group):
                context.stale[operation] = None
                return
        execution = operation.execution
        region, holder = None, None
        if execution is not None:
            region = execution.result
        elif operation.scratch is not None or operation.result is not None:
            region = operation.region
        if operation.result is not None:
            holder = Holder(operation.result)
        operation.state = State.DELIVERED
        self._move_to_ending(operation)
        now = context.now
        algorithm = operation.plan.algorithm if operation.plan is not None else ""
        for index, submit in enumerate(operation.submits):
            if submit is None:
                continue
            lease = 0
            if submit.client in operation.group.gone:
                context.out.append(Fail(submit.client, submit.request, wording.client_gone(operation)))
                continue
            if holder is not None:
                over = self._leases.over_quota(submit.client, holder.allocation.nbytes)
                if over is not None:
                    setting, held, limit = over
                    error = wording.lease_quota(operation, held, limit, setting)
                    context.out.append(Fail(submit.client, submit.request, error))
                    continue
                lease = self._leases.grant(submit.client, holder)
            elapsed = now - operation.times[index]
            context.out.append(Deliver(submit.client, submit.request, region, lease, (), algorithm, elapsed))
        operation.holder = holder
        operation.submits = []
        operation.parts = ()
        if operation.peers:
            operation.group.keeper.delivered(operation)
        context.counters["delivered"] += 1
        self.settle(operation)

    def settle(self, operation: Operation) -> None:
        """Answer and free what can be, after something of an ended operation completed."""
        if operation.state is State.FAILED:
            if operation.submits and operation.source_readers == 0:
                error = operation.error
                for submit in operation.submits:
                    if submit is not None and error is not None:
                        self._context.out.append(Fail(submit.client, submit.request, error))
                operation.submits = []
        elif operation.state is not State.DELIVERED or self._still_sends(operation):
            return
        if operation.outstanding:
            return
        execution, operation.execution = operation.execution, None
        if execution is not None:
            execution.dispose()
        if operation.state is State.DELIVERED and must_keep(operation.unconfirmed):
            if operation.result is not None and operation.scratch is not None:
                self._memory.release(operation.scratch)
                operation.scratch = None
            return
        self.release(operation)
        operation.group.ending.pop(operation.key, None)
        operation.group.keeper.forget(operation)

    def _still_sends(self, operation: Operation) -> bool:
        execution = operation.execution
        return execution is not None and not execution.complete and operation.group.error is None

    def release(self, operation: Operation) -> None:
        """Give the memory of the operation back (a delivered result when its leases are)."""
        if operation.scratch is not None:
            self._memory.release(operation.scratch)
            operation.scratch = None
        if operation.holder is not None:
            self._leases.drop(operation.holder)
        elif operation.result is not None:
            self._memory.release(operation.result)
        operation.result = operation.holder = None

    def _move_to_ending(self, operation: Operation) -> None:
        group = operation.group
        operation.wake = math.inf
        group.operations.pop(operation.key, None)
        group.ending[operation.key] = operation
