"""Who gets memory: all or nothing, in one order that all members agree on; READY, and taking it back.

Under pressure an operation whose ranks all arrived everywhere is served before all others, in the order of the stamps,
which is the same on every member. To make room for it, later operations that have not begun are withdrawn. So two
operations never hold halves that the other one waits for, whatever the order in which ranks submit.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from allreduced.daemon.engine import wording
from allreduced.daemon.engine.actions import SendFrame
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.ending import Ending
from allreduced.daemon.engine.execution import Execution, PeerFault
from allreduced.daemon.engine.free_list import aligned
from allreduced.daemon.engine.group import Group
from allreduced.daemon.engine.memory import Allocation, Memory
from allreduced.daemon.engine.operation import Operation, State
from allreduced.daemon.engine.plan import Plan
from allreduced.daemon.engine.program import program_for
from allreduced.daemon.engine.region import Region
from allreduced.daemon.engine.solo import Solo
from allreduced.daemon.engine.verdict import LastWords
from allreduced.daemon.engine.waiting import Waiting
from allreduced.protocol.peer import Queued, Ready, Withdraw, Withdrawn

_NOWHERE = Region(-1, 0, 0)


class Admission:
    """The queue for memory, and the READY protocol."""

    def __init__(
        self, context: Context, memory: Memory, ending: Ending, words: LastWords, groups: dict[int, Group]
    ) -> None:
        self._context = context
        self._memory = memory
        self._ending = ending
        self._words = words
        self._groups = groups
        self._waiting = Waiting()
        self._apart: dict[int, Waiting] = {}
        """By user who holds as much as one may: those that wait for that, while others are served."""
        self._mapping: dict[int, list[Operation]] = {}
        """By buffer that is being made: who waits for it."""
        self._leaving: Operation | None = None
        """The operation that gives its memory up for another one."""
        self._last: tuple[object, ...] = ()
        """No operation that could be withdrawn has a place behind this one."""

    def admit(self, operation: Operation) -> None:
        """Take an operation whose local ranks are all here and whose plan has no error."""
        if operation.plan is None:
            return
        execution = operation.execution = self._prepare(operation, operation.plan)
        if execution is None and not _crowded(operation):
            self._announce(operation)
            return
        result, scratch = self._needs(execution)
        exceeded = self._memory.never_fits(result, scratch)
        if exceeded is not None:
            error = wording.too_large(operation, result + scratch, self._context.node, *exceeded)
            self._words.fail(operation, error)
            return
        operation.state = State.QUEUED
        self._waiting.enter(operation)
        self.serve()
        if operation.state is State.QUEUED:
            self._tell_queued(operation)

    def moved(self, operation: Operation) -> None:
        """Take note that an operation that waits for memory has a place further to the front; serve it later."""
        self._waiting.enter(operation)
        self._context.freed = True

    def serve(self) -> None:
        """Reserve memory for those at the head of the queue, as far as it goes."""
        context = self._context
        context.freed = False
        waiting = self._waiting
        for user in tuple(self._apart):
            self._rejoin(user)
        while (head := waiting.first()) is not None:
            crowded = _crowded(head)
            needs = self._needs(head.execution)
            user = head.group.key.uid
            if (self._apart or self._memory.beyond_share(user, *needs)) and self._must_wait(head, user, needs):
                continue
            reserved = None if crowded else self._memory.reserve(head.group.number, *needs, user)
            if reserved is None:
                if head.absent or not self._make_room(head, crowded=crowded):
                    return
                continue
            waiting.leave(head)
            self._reserved(head, *reserved)
            if user in self._apart:
                self._rejoin(user)

    def _rejoin(self, user: int) -> None:
        """Look again at the first operation of a user that waits apart."""
        apart = self._apart[user]
        head = apart.first()
        if head is None:
            del self._apart[user]
        else:
            apart.leave(head)
            self._waiting.enter(head)

    def _must_wait(self, head: Operation, user: int, needs: tuple[int, int]) -> bool:
        """Let the head wait apart where its user holds too much; others are served meanwhile. False: it need not."""
        apart = self._apart.get(user)
        before = apart.first() if apart is not None else None
        if before is None or before.order() >= head.order():  # it may be here twice
            if not self._memory.beyond_share(user, *needs):
                return False
            if not head.absent and self._make_room(head, crowded=False, user=user):
                return True
        self._waiting.leave(head)
        self._apart.setdefault(user, Waiting()).enter(head)
        return True

    def arena_ready(self, buffer: int) -> None:
        """Go on with the operations that wait for this buffer."""
        for operation in self._mapping.pop(buffer, ()):
            if operation.state is State.MAPPING and operation.mapped:
                self._memory.served()
                self._announce(operation)

    def arena_failed(self, buffer: int) -> list[Operation]:
        """Return the operations that wait for this buffer, which will never come."""
        return [operation for operation in self._mapping.pop(buffer, ()) if operation.state is State.MAPPING]

    def again(self, operation: Operation) -> None:
        """Let an operation of :meth:`arena_failed` wait for memory once more."""
        self._requeue(operation)
        self._context.freed = True

    def ready_came(self, operation: Operation) -> None:
        """Begin if this READY was the last one that was missing."""
        if operation.state is State.READY and operation.unready == 0:
            self._start(operation)

    def withdraw_came(self, operation: Operation, peer: int, frame: Withdraw) -> None:
        """Answer a peer that wants its READY back."""
        view = operation.peers[peer]
        held = view.ready
        if operation.state in (State.RUNNING, State.BROKEN, State.DELIVERED):
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
        view, group = operation.peers[peer], operation.group
        if operation.state is not State.WITHDRAWING or not view.waiting or view.told_attempt != frame.attempt:
            self._context.counters["frames_ignored"] += 1
            return
        view.waiting = False
        view.refused = not frame.accepted
        if any(other.waiting for other in operation.peers):
            return
        verdict = operation.verdict
        if any(other.refused for other in operation.peers):
            operation.state = State.READY
            operation.pinned = True
            self._context.freed = True  # somebody else may have to make room
            operation.attempt += 1
            for node, member in group.others:
                if not operation.peers[member].refused:
                    self._send_ready(operation, node, member)
            self.ready_came(operation)
            return
        operation.state = State.RELEASING
        if verdict is not None and not verdict.kept and group.mine in verdict.words:
            # Nobody can have a result any more, so what it said becomes final.
            self._words.fail(operation, verdict.words[group.mine], final=True)
            return
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

    def _needs(self, execution: Execution | Solo | None) -> tuple[int, int]:
        """Return the bytes of result and scratch; a small result is a part of the scratch."""
        if execution is None:
            return 0, 0
        if execution.nbytes <= self._context.limits.inline_bytes:
            return 0, aligned(execution.nbytes) + execution.scratch_bytes
        return execution.nbytes, execution.scratch_bytes

    def _reserved(self, operation: Operation, result: Allocation | None, scratch: Allocation | None) -> None:
        operation.result, operation.scratch = result, scratch
        execution = operation.execution
        if execution is None:
            self._announce(operation)
            return
        if result is not None:
            place = result.region(0, execution.nbytes)
            windows = _NOWHERE if scratch is None else scratch.region(0, execution.scratch_bytes)
        elif scratch is not None:
            place = scratch.region(0, execution.nbytes)
            windows = scratch.region(aligned(execution.nbytes), execution.scratch_bytes)
        else:
            place = windows = _NOWHERE
        execution.place(place, windows)
        if operation.mapped:
            self._announce(operation)
            return
        operation.state = State.MAPPING
        self._holds(operation)
        for allocation in (result, scratch):
            if allocation is not None and not allocation.arena.ready:
                self._mapping.setdefault(allocation.arena.buffer, []).append(operation)

    def _announce(self, operation: Operation) -> None:
        """Post the receives and tell the others that this node is ready."""
        operation.state = State.READY
        if operation.peers:
            if isinstance(operation.execution, Execution):
                operation.execution.post()
            if not operation.serial:
                operation.group.keeper.enlist(operation)
            operation.attempt += 1
            for node, member in operation.group.others:
                self._send_ready(operation, node, member)
        if operation.unready == 0:
            self._start(operation)
        elif operation.execution is not None:
            self._holds(operation)

    def _holds(self, operation: Operation) -> None:
        """Take note that an operation has memory and has not begun."""
        place = operation.order()
        if place > self._last:
            self._last = place

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
                    operation.serial,
                    group.keeper.take_owed(member),
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
        operation.state = State.RUNNING
        if execution is None:
            self._ending.deliver(operation)
            return
        for node, member in operation.group.others:
            ready = operation.peers[member].ready
            if ready is not None and isinstance(execution, Execution):
                try:
                    execution.accept(member, ready.grants, pump=False)
                except PeerFault as fault:
                    self._words.fail(operation, wording.bad_frame(operation, node, str(fault)), broken=True)
                    return
        execution.start()
        if execution.final and operation.source_readers == 0:
            self._ending.deliver(operation)

    def _make_room(self, head: Operation, *, crowded: bool, user: int | None = None) -> bool:
        """Withdraw the last operation behind ``head`` that has not begun; True where that freed memory at once.

        ``crowded``: its group has too many operations that are ready, there is no lack of memory. ``user``: the memory
        must come from operations of this user.
        """
        leaving = self._leaving
        if leaving is not None and leaving.state in (State.WITHDRAWING, State.RELEASING):
            return False
        place = head.order()
        if crowded:
            last = self._last_to_begin((head.group,))
        elif user is not None:
            groups = [group for group in self._groups.values() if group.key.uid == user]
            last = self._last_to_begin(groups, only_with_memory=True)
        elif self._last < place:
            return False
        else:
            last = self._last_to_begin(self._groups.values(), only_with_memory=True)
            self._last = last.order() if last is not None else ()
        if last is None or last.order() < place:
            return False
        self._context.counters["withdrawn"] += 1
        if last.state is State.MAPPING:
            self._requeue(last)
            return True
        last.state = State.WITHDRAWING
        self._leaving = last
        group = last.group
        for node, member in group.others:
            view = last.peers[member]
            view.waiting, view.refused = True, False
            frame = Withdraw(group.number, group.generation, last.name, last.use, view.told_attempt)
            self._context.out.append(SendFrame(node, frame))
        return False

    def _last_to_begin(self, groups: Iterable[Group], *, only_with_memory: bool = False) -> Operation | None:
        """Return the operation with the last place among those that are ready and may still be withdrawn."""
        last: Operation | None = None
        for group in groups:
            for operation in group.operations.values():
                if (
                    (operation.state is State.READY or operation.state is State.MAPPING)
                    and (operation.execution is not None or not only_with_memory)
                    and not operation.pinned
                    and operation.verdict is None
                    and (last is None or operation.order() > last.order())
                ):
                    last = operation
        return last

    def _requeue(self, operation: Operation) -> None:
        self._ending.release(operation)
        if operation.serial:
            operation.group.keeper.forget(operation)
            operation.serial = 0
        operation.state = State.QUEUED
        self._waiting.enter(operation)
        if operation.attempt == 0:
            self._tell_queued(operation)


def _crowded(operation: Operation) -> bool:
    """Tell whether the group must not have one more operation that members may have to give each other."""
    return bool(operation.peers) and not operation.serial and not operation.group.keeper.has_room
