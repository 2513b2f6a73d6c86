"""The engine: one event in, a list of actions out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, TypeAlias

from allreduced.core.errors import AllReducedError, LimitExceeded
from allreduced.daemon.engine import wording
from allreduced.daemon.engine.actions import Action, Fail, GiveUp
from allreduced.daemon.engine.admission import Admission
from allreduced.daemon.engine.change import Changing
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.departures import Departures
from allreduced.daemon.engine.disputes import Disputes
from allreduced.daemon.engine.early import EarlyFrames
from allreduced.daemon.engine.ending import Ending
from allreduced.daemon.engine.events import (
    ArenaFailed,
    ArenaReady,
    Changed,
    ClientGone,
    Event,
    FrameArrived,
    Freeze,
    GroupBroken,
    GroupForgotten,
    GroupStarted,
    Heard,
    LeasesReturned,
    NodeDeparted,
    RanksLeft,
    ReceiveCancelled,
    Received,
    Reduced,
    RoomMade,
    Sent,
    Submitted,
    TimePassed,
)
from allreduced.daemon.engine.execution import Execution, PeerFault
from allreduced.daemon.engine.fence import belongs
from allreduced.daemon.engine.fetch import Fetching
from allreduced.daemon.engine.flights import Fetched, Posting, Sending
from allreduced.daemon.engine.forgetting import Forgetting
from allreduced.daemon.engine.freshness import DEAF, STALL
from allreduced.daemon.engine.group import Group
from allreduced.daemon.engine.kept import Keeper
from allreduced.daemon.engine.leases import Leases
from allreduced.daemon.engine.limits import Limits
from allreduced.daemon.engine.lists import Lists
from allreduced.daemon.engine.matching import Matching
from allreduced.daemon.engine.memory import Memory
from allreduced.daemon.engine.operation import STARTED, Operation, State
from allreduced.daemon.engine.reading import Reading, take_reading
from allreduced.daemon.engine.snapshot import Snapshot, take_snapshot
from allreduced.daemon.engine.timers import Timed, Timers
from allreduced.daemon.engine.verdict import LastWords
from allreduced.protocol.peer import EngineFrame

_Handler: TypeAlias = "Callable[[Any], None]"
_PAST_GROUPS = 1024


class Engine:
    """Collectives of all groups on one node, without any IO.

    Everything that happens comes in through :meth:`handle`, in order; everything to be done goes out of it. The same
    events give the same actions. No sequence of events raises. ``node`` is this agent's name, as members know it.
    """

    def __init__(self, node: str, limits: Limits) -> None:
        self._context = Context(node, limits)
        self._stall = STALL * limits.failure_timeout
        self._groups: dict[int, Group] = {}
        self._past: deque[int] = deque(maxlen=_PAST_GROUPS)
        self._forgotten: list[Group] = []
        self._early = EarlyFrames(self._context)
        self._timers: Timers[Timed] = Timers(self._context)
        self._memory = Memory(self._context)
        self._leases = Leases(self._context, self._memory)
        self._ending = Ending(self._context, self._memory, self._leases)
        words = self._words = LastWords(self._context, self._ending, self._timers)
        self._admission = Admission(self._context, self._memory, self._ending, words, self._groups)
        self._lists = Lists(words)
        disputes = Disputes(self._context, words, self._timers)
        departures = self._departures = Departures(words)
        fetching = self._fetching = Fetching(self._context, self._ending, words)
        self._matching = Matching(
            self._context,
            self._admission,
            self._ending,
            words,
            disputes,
            departures,
            fetching,
            self._lists,
            self._timers,
        )
        self._changing = Changing(self._context, self._admission, self._ending, words, fetching, self._timers)
        self._handlers: Mapping[type, _Handler] = {
            GroupStarted: self._group_started,
            GroupBroken: self._group_broken,
            RanksLeft: self._ranks_left,
            GroupForgotten: self._group_forgotten,
            Submitted: self._submitted,
            ClientGone: self._client_gone,
            Freeze: self._freeze,
            Changed: self._changed,
            Heard: self._heard,
            NodeDeparted: self._node_departed,
            LeasesReturned: self._leases_returned,
            FrameArrived: self._frame_arrived,
            Received: self._received,
            ReceiveCancelled: self._receive_cancelled,
            Sent: self._sent,
            Reduced: self._reduced,
            ArenaReady: self._arena_ready,
            ArenaFailed: self._arena_failed,
            RoomMade: self._room_made,
            TimePassed: self._time_passed,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event at ``now`` (seconds, monotonic) and return what to do, in order."""
        context = self._context
        if now - context.now > self._stall and (self._groups or self._in_touch()):
            self._stalled(now)
        context.now = now
        out: list[Action] = []
        context.out = out
        self._handlers[type(event)](event)
        while context.differing:
            self._lists.failed(context.differing.pop())
        if context.stale:
            self._deliver_stale()
        while context.freed:
            self._admission.serve()
        if self._forgotten:
            self._drop_forgotten()
        return out

    def use_limits(self, limits: Limits) -> None:
        """Judge by these limits from now on. ``arena_bytes``, ``scratch_bytes`` and the times must be as they were."""
        self._context.limits = limits

    def _in_touch(self) -> bool:
        """Tell whether others were heard shortly before the last event: heartbeats make events without groups."""
        since = self._context.now - self._stall
        return any(at > since for at in self._context.heard.values())

    def _stalled(self, now: float) -> None:
        """Take note that this agent was held up: what comes now may have been sent long ago."""
        context = self._context
        context.counters["stalls"] += 1
        context.heard.clear()
        context.deaf_until = now + DEAF * context.limits.failure_timeout
        for group in self._groups.values():
            group.fresh_until = -inf

    def _deliver_stale(self) -> None:
        """Try again to deliver what waits for signs of life."""
        stale = list(self._context.stale)
        self._context.stale.clear()
        for operation in stale:
            if operation.done:
                self._ending.deliver(operation)

    @property
    def idle(self) -> bool:
        """True where no operation that a local rank submitted is under way, here or (what it sends) for peers."""
        return not any(group.busy for group in self._groups.values())

    def snapshot(self, now: float = 0.0, most: int | None = None) -> Snapshot:
        """Return what ``status`` shows, as plain data: groups, operations in flight and what each waits for.

        ``now``: for how long; the time of the last event where none is given. ``most``: operations that are told, those
        of each group that began first; at least one of each.
        """
        context, groups = self._context, self._groups
        each = None if most is None else max(most // max(len(groups), 1), 1)
        at = max(now, context.now)
        return take_snapshot(context, groups, self._memory, self._leases, len(self._early), at, each)

    def reading(self, most: int, now: float) -> Reading:
        """Return the numbers for metrics at ``now``, with those of at most ``most`` groups."""
        groups, memory, leases = self._groups, self._memory, self._leases
        return take_reading(groups.values(), len(groups), most, now, reserved=memory.reserved, leased=leases.nbytes)

    def _group_started(self, event: GroupStarted) -> None:
        if event.group in self._groups:
            self._context.counters["events_ignored"] += 1
            return
        group = Group(event)
        self._groups[event.group] = group
        self._matching.start(group)
        self._play_early(group)

    def _play_early(self, group: Group) -> None:
        """Take the frames that came before the group, or its generation, began here."""
        for node, frame in self._early.take(group.number):
            self._frame_of(group, node, frame)

    def _group_broken(self, event: GroupBroken) -> None:
        group = self._groups.get(event.group)
        if group is not None and not group.cut_off:
            self._break(group, event.error)

    def _freeze(self, event: Freeze) -> None:
        group = self._groups.get(event.group)
        if group is not None:
            self._changing.freeze(group, event.generation)

    def _changed(self, event: Changed) -> None:
        group = self._groups.get(event.group)
        if group is None:
            return
        held = self._changing.install(group, event.generation, event.change)
        if group.cut_off:
            self._matching.stop_forgetting(group)
            return
        left = tuple(rank for rank in event.change.left if rank not in group.left)
        if group.error is not None:
            group.left.update(left)
        elif left:
            self._matching.ranks_left(group, left)
        for submit in held:
            self._matching.submit(group, submit)
        self._play_early(group)

    def _break(self, group: Group, error: AllReducedError) -> None:
        self._changing.cut_off(group, error)
        self._matching.stop_forgetting(group)

    def _ranks_left(self, event: RanksLeft) -> None:
        group = self._groups.get(event.group)
        if group is not None and group.error is None:
            self._matching.ranks_left(group, event.ranks)

    def _group_forgotten(self, event: GroupForgotten) -> None:
        group = self._groups.get(event.group)
        if group is not None and not group.forgotten:
            group.forgotten = True
            self._forgotten.append(group)
            if group.error is None:
                self._matching.ranks_left(group, group.ranks)
            group.keeper.flush()
            # Nobody needs what is kept here, or could say so any more.
            for _, member in group.others:
                for kept in group.keeper.departed(member):
                    self._ending.settle(kept)
            # A result that comes from another member is not waited for as long as its callers would have: they left,
            # and who has it may have forgotten the group as well.
            for operation in group.operations.values():
                if operation.state is State.RESTARTING or operation.state is State.FETCHING:
                    operation.deadline = min(operation.deadline, self._context.now)
                    self._timers.sooner(operation, operation.deadline)

    def _drop_forgotten(self) -> None:
        for group in [group for group in self._forgotten if not group.operations and not group.ending]:
            self._forgotten.remove(group)
            group.keeper.flush()
            del self._groups[group.number]
            self._past.append(group.number)
            self._memory.forget(group.number)
            if not self._groups:
                self._memory.drop_idle()

    def _submitted(self, event: Submitted) -> None:
        group = self._groups.get(event.group)
        if group is None:
            self._context.out.append(Fail(event.client, event.request, wording.not_open(event.group)))
            return
        self._matching.submit(group, event)

    def _client_gone(self, event: ClientGone) -> None:
        self._leases.client_gone(event.client)
        for group in self._groups.values():
            if event.client in group.local.values():
                group.gone.add(event.client)

    def _heard(self, event: Heard) -> None:
        for node in event.nodes:
            self._context.hear(node)

    def _node_departed(self, event: NodeDeparted) -> None:
        group = self._groups.get(event.group)
        member = group.member_of.get(event.node) if group is not None else None
        if group is None or member is None or member in group.departed:
            self._context.counters["events_ignored"] += 1
            return
        group.departed.add(member)
        group.present &= ~(1 << member)
        group.fresh_until = -inf
        for kept in group.keeper.departed(member):
            self._ending.settle(kept)
        if group.error is None and not group.frozen:
            self._departures.departed(group, member)

    def _leases_returned(self, event: LeasesReturned) -> None:
        self._leases.give_back(event.client, event.leases)

    def _frame_arrived(self, event: FrameArrived) -> None:
        self._context.hear(event.node)
        group = self._groups.get(event.frame.group)
        if group is not None:
            self._frame_of(group, event.node, event.frame)
        elif event.frame.group in self._past:
            self._context.counters["frames_ignored"] += 1
        else:
            self._early.keep(event.node, event.frame)

    def _frame_of(self, group: Group, node: str, frame: EngineFrame) -> None:
        if belongs(frame.generation, group.generation):
            self._matching.frame(group, node, frame)
        elif frame.generation > group.generation and not group.cut_off and node in group.member_of:
            self._early.keep(node, frame)
        else:
            self._context.counters["frames_ignored"] += 1

    def _received(self, event: Received) -> None:
        posting = self._context.receives.get(event.receive)
        if posting is None:
            self._context.counters["receives_ignored"] += 1
            return
        operation = posting.operation
        if posting.cancelled:
            posting.left -= event.nbytes
            if posting.left <= 0:
                self._closed(posting)
            return
        if isinstance(posting, Fetched):
            self._context.hear(posting.node)
            self._fetching.received(posting, event)
            return
        execution, group, peer = operation.execution, operation.group, posting.row.peer
        self._context.hear(posting.node)
        if not isinstance(execution, Execution):
            return
        try:
            if event.tag != group.generation << 32 | operation.peers[peer].told_attempt:
                raise PeerFault("sent data of another attempt")
            execution.received(posting, event.offset, event.nbytes)
        except PeerFault as fault:
            # What fits landed all the same: a receive that is full is over, and nobody would answer a cancel of it.
            if 0 < event.nbytes <= posting.left and 0 <= event.offset <= posting.nbytes - event.nbytes:
                posting.left -= event.nbytes
            if posting.left == 0:
                del self._context.receives[posting.number], operation.postings[posting.number]
            error = wording.bad_frame(operation, posting.node, str(fault))
            self._words.fail(operation, error, broken=True)
            return
        if operation.state is State.RUNNING:
            execution.resume(posting.row.block)
            self._deliver_if_done(operation)

    def _receive_cancelled(self, event: ReceiveCancelled) -> None:
        posting = self._context.receives.get(event.receive)
        if posting is not None and posting.cancelled:
            self._closed(posting)

    def _closed(self, posting: Posting | Fetched) -> None:
        operation = posting.operation
        del self._context.receives[posting.number]
        if isinstance(posting, Fetched):
            operation.fetched = None
        else:
            del operation.postings[posting.number]
        operation.outstanding -= 1
        self._settle(operation)

    def _settle(self, operation: Operation) -> None:
        """Do what became possible when something of an operation completed that does not run (any more)."""
        if operation.state is State.RELEASING:
            self._admission.released(operation)
        elif operation.state is State.RESTARTING or operation.state is State.FETCHING:
            self._changing.rested(operation)
        else:
            self._ending.settle(operation)

    def _sent(self, event: Sent) -> None:
        sending = self._context.sends.pop(event.send, None)
        if sending is None:
            return
        operation = sending.operation
        del operation.sendings[event.send]
        operation.outstanding -= 1
        operation.source_readers -= sending.of_source
        if type(sending) is Sending and isinstance(operation.execution, Execution) and operation.state in STARTED:
            operation.execution.sent(sending)
        if operation.state is State.RUNNING:
            self._deliver_if_done(operation)
        else:
            self._settle(operation)

    def _reduced(self, event: Reduced) -> None:
        job = self._context.jobs.pop(event.job, None)
        if job is None:
            return
        operation = job.operation
        operation.outstanding -= 1
        operation.source_readers -= job.of_source
        if operation.state is State.RUNNING and operation.execution is not None:
            operation.execution.reduced(job)
            self._deliver_if_done(operation)
        else:
            self._settle(operation)

    def _deliver_if_done(self, operation: Operation) -> None:
        execution = operation.execution
        if execution is not None and execution.final and operation.source_readers == 0:
            self._ending.deliver(operation)

    def _arena_ready(self, event: ArenaReady) -> None:
        self._memory.arena_ready(event.buffer)
        self._admission.arena_ready(event.buffer)

    def _arena_failed(self, event: ArenaFailed) -> None:
        waiting = self._admission.arena_failed(event.buffer)
        held = [part for operation in waiting for part in (operation.result, operation.scratch) if part is not None]
        wait = isinstance(event.error, LimitExceeded) and self._memory.lower(event.buffer, held)
        for operation in waiting:
            if wait:
                self._admission.again(operation)
            else:
                self._words.fail(operation, wording.not_made(operation, self._context.node, event.error))
        self._memory.arena_failed(event.buffer)

    def _room_made(self, event: RoomMade) -> None:
        del event
        self._memory.raise_ceiling()

    def _time_passed(self, event: TimePassed) -> None:
        del event
        for due in self._timers.due():
            if isinstance(due, Operation):
                self._matching.overdue(due)
            elif isinstance(due, Keeper):
                due.due()
            elif isinstance(due, Forgetting):
                error = self._matching.round_overdue(due)
                if error is not None and due.group.error is None:
                    self._context.out.append(GiveUp(due.group.number, error))
                    self._break(due.group, error)
        self._timers.arm()
