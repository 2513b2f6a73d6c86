"""Who gets memory: all or nothing, in one order that all members agree on; READY, and taking it back.

Under pressure an operation whose ranks all arrived everywhere is served before all others, in the order of the stamps,
which is the same on every member. To make room for it, later operations that have not begun are withdrawn. So two
operations never hold halves that the other one waits for, whatever the order in which ranks submit.
"""

from __future__ import annotations

from math import inf

from allreduced.daemon.engine import wording
from allreduced.daemon.engine.actions import SendFrame
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.ending import Ending
from allreduced.daemon.engine.execution import Execution, PeerFault
from allreduced.daemon.engine.group import Group
from allreduced.daemon.engine.memory import Allocation, Memory
from allreduced.daemon.engine.operation import Operation, State
from allreduced.daemon.engine.plan import Plan
from allreduced.daemon.engine.program import program_for
from allreduced.daemon.engine.region import Region
from allreduced.daemon.engine.solo import Solo
from allreduced.protocol.peer import Queued, Ready, Withdraw, Withdrawn

_NOWHERE = Region(-1, 0, 0)


class Admission:
    """The queue for memory, and the READY protocol."""

    def __init__(self, context: Context, memory: Memory, ending: Ending, groups: dict[int, Group]) -> None:
        self._context = context
        self._memory = memory
        self._ending = ending
        self._groups = groups
        self._queue: list[Operation] = []
        self._mapping: dict[int, list[Operation]] = {}
        """By buffer that is being made: who waits for it."""

    def admit(self, operation: Operation) -> None:
        """Take an operation whose local ranks are all here and whose plan has no error."""
        if operation.plan is None:
            return
        execution = operation.execution = self._prepare(operation, operation.plan)
        if execution is None:
            self._announce(operation)
            return
        result, scratch = self._needs(operation, execution)
        if not self._memory.can_ever_fit(result, scratch):
            error = wording.too_large(operation, result + scratch, self._context.node)
            self._ending.fail(operation, error)
            return
        operation.state = State.QUEUED
        self._queue.append(operation)
        self.serve()
        if operation.state is State.QUEUED:
            self._tell_queued(operation)

    def serve(self) -> None:
        """Reserve memory for those at the head of the queue, as far as it goes."""
        context = self._context
        context.freed = False
        queue = self._queue
        while queue:
            head = queue[0] if len(queue) == 1 else min(queue, key=Operation.order)
            execution = head.execution
            if head.state is not State.QUEUED or execution is None:
                queue.remove(head)
                continue
            reserved = self._memory.reserve(head.group.number, *self._needs(head, execution))
            if reserved is None:
                if head.absent or not self._make_room(head):
                    return
                continue
            queue.remove(head)
            self._reserved(head, execution, *reserved)

    def arena_ready(self, buffer: int) -> None:
        """Go on with the operations that wait for this buffer."""
        for operation in self._mapping.pop(buffer, ()):
            if operation.state is State.MAPPING and _mapped(operation):
                self._announce(operation)

    def arena_failed(self, buffer: int) -> list[Operation]:
        """Return the operations that wait for this buffer, which will never come."""
        return [operation for operation in self._mapping.pop(buffer, ()) if operation.state is State.MAPPING]

    def ready_came(self, operation: Operation) -> None:
        """Begin if this READY was the last one that was missing."""
        if operation.state is State.READY and operation.unready == 0:
            self._start(operation)

    def withdraw_came(self, operation: Operation, peer: int, frame: Withdraw) -> None:
        """Answer a peer that wants its READY back."""
        view = operation.peers[peer]
        held = view.ready
        if operation.state in (State.RUNNING, State.DELIVERED):
            self.answer(operation.group, peer, frame, accepted=False)
        elif held is not None and held.attempt == frame.attempt:
            view.ready = None
            operation.unready += 1
            self.answer(operation.group, peer, frame, accepted=True)
        else:
            self._context.counters["frames_ignored"] += 1

    def answer(self, group: Group, peer: int, frame: Withdraw, *, accepted: bool) -> None:
        """Send Withdrawn."""
        answer = Withdrawn(group.number, group.generation, frame.name, frame.use, frame.attempt, accepted)
        self._context.out.append(SendFrame(group.members[peer].node, answer))

    def withdrawn_came(self, operation: Operation, peer: int, frame: Withdrawn) -> None:
        """Take a peer's answer to Withdraw; after the last one free the memory, or be READY again."""
        view = operation.peers[peer]
        if operation.state is not State.WITHDRAWING or not view.waiting or view.told_attempt != frame.attempt:
            self._context.counters["frames_ignored"] += 1
            return
        view.waiting = False
        view.refused = not frame.accepted
        if any(other.waiting for other in operation.peers):
            return
        if any(other.refused for other in operation.peers):
            operation.state = State.READY
            operation.pinned = True
            self._context.freed = True  # somebody else may have to make room
            operation.attempt += 1
            for node, member in operation.group.others:
                if not operation.peers[member].refused:
                    self._send_ready(operation, node, member)
            self.ready_came(operation)
            return
        operation.state = State.RELEASING
        self._ending.cancel_receives(operation)
        self.released(operation)

    def released(self, operation: Operation) -> None:
        """Queue a withdrawn operation again once nothing can land in its memory."""
        if operation.state is State.RELEASING and operation.outstanding == 0:
            self._requeue(operation)
            self._context.freed = True

    def _prepare(self, operation: Operation, plan: Plan) -> Execution | Solo | None:
        """Return what will run the operation; None where there is no data."""
        group, fingerprint = operation.group, operation.fingerprint
        if not plan.nbytes or fingerprint is None:
            return None
        sources = [
            submit.source
            for submit in operation.submits
            if submit is not None
            and submit.source is not None
            and (not plan.broadcast or submit.rank == fingerprint.root)
        ]
        members = len(group.members)
        if members == 1:
            return Solo(self._context, operation, plan.dtype, plan.reduction, plan.nbytes, sources)
        program = program_for(fingerprint.kind, plan.algorithm, members, plan.root_member, group.mine)
        return Execution(self._context, operation, plan, fingerprint.count, sources, program)

    def _needs(self, operation: Operation, execution: Execution | Solo) -> tuple[int, int]:
        """Return the bytes of result and scratch; a small result is a part of the scratch."""
        if execution.nbytes <= self._context.limits.inline_bytes:
            return 0, ((execution.nbytes + 63) & ~63) + execution.scratch_bytes
        return execution.nbytes, execution.scratch_bytes

    def _reserved(
        self, operation: Operation, execution: Execution | Solo, result: Allocation | None, scratch: Allocation | None
    ) -> None:
        operation.result, operation.scratch = result, scratch
        if result is not None:
            place = result.region(0, execution.nbytes)
            windows = _NOWHERE if scratch is None else scratch.region(0, execution.scratch_bytes)
        elif scratch is not None:
            place = scratch.region(0, execution.nbytes)
            windows = scratch.region((execution.nbytes + 63) & ~63, execution.scratch_bytes)
        else:
            place = windows = _NOWHERE
        execution.place(place, windows)
        if _mapped(operation):
            self._announce(operation)
            return
        operation.state = State.MAPPING
        for allocation in (result, scratch):
            if allocation is not None and not allocation.arena.ready:
                self._mapping.setdefault(allocation.arena.buffer, []).append(operation)

    def _announce(self, operation: Operation) -> None:
        """Post the receives and tell the others that this node is ready."""
        operation.state = State.READY
        if operation.peers:
            if isinstance(operation.execution, Execution):
                operation.execution.post()
            operation.attempt += 1
            for node, member in operation.group.others:
                self._send_ready(operation, node, member)
        if operation.unready == 0:
            self._start(operation)

    def _send_ready(self, operation: Operation, node: str, member: int) -> None:
        group, fingerprint = operation.group, operation.fingerprint
        if fingerprint is None:
            return
        operation.peers[member].told_attempt = operation.attempt
        grants = operation.execution.grants(member) if isinstance(operation.execution, Execution) else ()
        self._context.out.append(
            SendFrame(
                node,
                Ready(
                    group.number,
                    group.generation,
                    operation.name,
                    operation.use,
                    operation.attempt,
                    fingerprint,
                    operation.stamp,
                    grants,
                ),
            )
        )

    def _tell_queued(self, operation: Operation) -> None:
        """Tell the others once that all ranks are here but no memory, so that the order is known everywhere."""
        if operation.queued_told:
            return
        operation.queued_told = True
        group = operation.group
        frame = Queued(group.number, group.generation, operation.name, operation.use, operation.stamp)
        for node, _ in group.others:
            self._context.out.append(SendFrame(node, frame))

    def _start(self, operation: Operation) -> None:
        """Begin: every member is ready and all fingerprints agree."""
        if operation.disputed < inf:
            return
        execution = operation.execution
        if execution is None:
            self._ending.deliver(operation)
            return
        operation.state = State.RUNNING
        for node, member in operation.group.others:
            ready = operation.peers[member].ready
            if ready is not None and isinstance(execution, Execution):
                try:
                    execution.accept(member, ready.grants, pump=False)
                except PeerFault as fault:
                    self._ending.fail(operation, wording.bad_frame(operation, node, str(fault)))
                    return
        execution.start()
        if execution.final and operation.source_readers == 0:
            self._ending.deliver(operation)

    def _make_room(self, head: Operation) -> bool:
        """Withdraw the last operation behind ``head`` that has not begun; True where that freed memory at once."""
        last: Operation | None = None
        for group in self._groups.values():
            for operation in group.operations.values():
                state = operation.state
                if state is State.WITHDRAWING or state is State.RELEASING:
                    return False
                if operation.execution is None or operation.pinned:
                    continue
                if (state is State.READY or state is State.MAPPING) and (
                    last is None or operation.order() > last.order()
                ):
                    last = operation
        if last is None or last.order() < head.order():
            return False
        self._context.counters["withdrawn"] += 1
        if last.state is State.MAPPING:
            self._requeue(last)
            return True
        last.state = State.WITHDRAWING
        group = last.group
        for node, member in group.others:
            view = last.peers[member]
            view.waiting, view.refused = True, False
            frame = Withdraw(group.number, group.generation, last.name, last.use, view.told_attempt)
            self._context.out.append(SendFrame(node, frame))
        return False

    def _requeue(self, operation: Operation) -> None:
        self._ending.release(operation)
        operation.state = State.QUEUED
        self._queue.append(operation)
        if operation.attempt == 0:
            self._tell_queued(operation)


def _mapped(operation: Operation) -> bool:
    return all(allocation is None or allocation.arena.ready for allocation in (operation.result, operation.scratch))
