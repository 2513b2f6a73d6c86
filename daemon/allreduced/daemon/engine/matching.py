"""Who arrived at which operation: submits of local ranks and frames of peers, matched by group, name and use."""

from __future__ import annotations

from math import inf

from allreduced.core.errors import AllReducedError
from allreduced.daemon.engine import wording
from allreduced.daemon.engine.actions import Fail, SendFrame
from allreduced.daemon.engine.admission import Admission
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.departures import Departures
from allreduced.daemon.engine.disputes import Disputes
from allreduced.daemon.engine.ending import Ending
from allreduced.daemon.engine.events import Submitted
from allreduced.daemon.engine.execution import Execution, PeerFault
from allreduced.daemon.engine.fetch import Fetching
from allreduced.daemon.engine.forgetting import Forgetting, Held
from allreduced.daemon.engine.group import Group
from allreduced.daemon.engine.kept import Keeper
from allreduced.daemon.engine.lists import Lists
from allreduced.daemon.engine.operation import ENDED, STARTED, Operation, State
from allreduced.daemon.engine.plan import plan_for
from allreduced.daemon.engine.timers import Timed, Timers
from allreduced.daemon.engine.verdict import LastWords
from allreduced.protocol.peer import (
    Abort,
    Arrived,
    Confirm,
    Differs,
    EngineFrame,
    Fetch,
    Forget,
    Forgettable,
    Kept,
    MoreGrants,
    OperationFrame,
    Queued,
    Ready,
    Withdraw,
    Withdrawn,
)

_OPENING = (Ready, Queued, Arrived, Differs)
GONE = 1 << 62
"""The next use of a rank that left: it never waits for anything."""


class Matching:
    """Opens operations and fills in who is there."""

    def __init__(
        self,
        context: Context,
        admission: Admission,
        ending: Ending,
        words: LastWords,
        disputes: Disputes,
        departures: Departures,
        fetching: Fetching,
        lists: Lists,
        timers: Timers[Timed],
    ) -> None:
        self._context = context
        self._admission = admission
        self._ending = ending
        self._words = words
        self._disputes = disputes
        self._departures = departures
        self._fetching = fetching
        self._lists = lists
        self._timers = timers

    def start(self, group: Group) -> None:
        """Prepare a new group."""
        group.forgetting = Forgetting(self._context, group)
        group.keeper = Keeper(self._context, self._timers, group)
        for node, _ in group.others:
            self._context.hear(node)

    def submit(self, group: Group, submit: Submitted) -> None:
        """Take the submit of a local rank."""
        context = self._context
        place = group.place.get(submit.rank)
        if place is None or group.local.get(submit.rank) != submit.client or submit.rank in group.left:
            self._refuse(submit, wording.not_yours(group, submit.rank))
            return
        if group.error is not None:
            self._refuse(submit, group.error)
            return
        error = self._lists.refusal(group, place, submit)
        if error is not None:
            self._refuse(submit, error)
            return
        if submit.name in group.forgetting.frozen:
            group.lists.pop(place, None)  # what belongs to this call may come first
            self._hold(group.forgetting, submit)
            return
        uses = group.uses.get(submit.name)
        unnamed = None
        if uses is None:
            group.forgetting.look()
            limits = context.limits
            beyond = len(group.uses) - limits.names - 2 * limits.names_kept
            if beyond >= 0:
                unnamed = wording.too_many_names(group, submit.name, limits.names)
            # The others are told by an operation that fails, which takes memory itself until its name is forgotten.
            if unnamed is not None and beyond >= limits.operations:
                group.lists.pop(place, None)
                self._refuse(submit, unnamed)
                return
            uses = group.uses[submit.name] = [GONE if rank in group.left else 0 for rank in group.ranks]
        use = uses[place]
        uses[place] = use + 1
        key = (submit.name, use)
        operation = group.operations.get(key)
        crowded = False
        if operation is None:
            error = group.told_late(key, submit.rank)
            if error is not None:
                self._lists.called(group, place, submit, None, error)
                self._refuse(submit, error)
                return
            operation = self._open(group, submit.name, use)
            crowded = len(group.operations) > context.limits.operations
        self._lists.called(group, place, submit, operation)
        operation.submits[place] = submit
        operation.times[place] = context.now
        operation.missing -= 1
        group.lateness.called(place, context.now - operation.known, last=operation.missing == 0)
        self._take_time(operation, submit)
        if operation.priority < submit.priority or operation.missing + 1 == len(operation.submits):
            operation.priority = submit.priority
        if place == 0 and group.mine == 0:
            context.clock += 1
            operation.stamp = (-submit.priority, context.clock, 0)
        if submit.refused is not None:
            self._words.fail(operation, wording.refused(operation, submit.rank, submit.refused))
            return
        if unnamed is not None:
            self._words.fail(operation, unnamed)
            return
        if operation.disputed < inf or self._disputes.disagrees(operation, submit.fingerprint):
            self._disputes.dispute(operation)
            return
        error = self._check(operation, submit)
        if error is not None:
            self._words.fail(operation, error)
            return
        if crowded:
            self._words.fail(operation, wording.too_many(operation, context.limits.operations))
            return
        if group.left and self._departures.check(operation):
            return
        if operation.missing == 0:
            self._admission.admit(operation)
        if operation.peers and (operation.state is State.GATHERING or operation.state is State.MAPPING):
            self._tell_arrived(operation, to_all=operation.told)

    def frame(self, group: Group, node: str, frame: EngineFrame) -> None:
        """Take a frame of another member."""
        peer = group.member_of.get(node)
        if peer is None or (group.error is not None and (group.cut_off or not isinstance(frame, Fetch | Confirm))):
            self._context.counters["frames_ignored"] += 1
            return
        if isinstance(frame, Ready):
            if frame.confirms:
                self._confirmed(group, peer, frame.confirms)
        elif isinstance(frame, Confirm):
            self._confirmed(group, peer, frame.serials)
            if frame.everything:
                for kept in group.keeper.has_everything(peer):
                    self._ending.settle(kept)
            return
        elif isinstance(frame, Forget | Forgettable):
            self._resume(group, group.forgetting.frame(peer, frame))
            return
        if isinstance(frame, Fetch):
            self._fetching.fetch_came(group, node, frame)
            return
        if group.forgetting.frozen and group.forgetting.holds(peer, frame):
            group.forgetting.held.append((node, frame))
            return
        key = (frame.name, frame.use)
        operation = group.operations.get(key)
        if isinstance(frame, Abort):
            self._words.abort_came(group, peer, frame, operation or group.ending.get(key))
            return
        if operation is None and isinstance(frame, MoreGrants):
            operation = group.ending.get(key)  # perhaps delivered here while a peer still takes data from it
        if operation is None:
            operation = self._find_or_open(group, peer, frame)
            if operation is None:
                return
        view = operation.peers[peer]
        if isinstance(frame, Ready):
            self._ready(operation, peer, frame)
        elif isinstance(frame, MoreGrants):
            execution, held = operation.execution, view.ready
            if held is None or held.attempt != frame.attempt or not isinstance(execution, Execution):
                self._context.counters["frames_ignored"] += 1
            elif operation.state in STARTED:
                try:
                    execution.accept(peer, frame.grants, pump=True)
                except PeerFault as fault:
                    self._words.fail(operation, wording.bad_frame(operation, node, str(fault)), broken=True)
            else:
                error = wording.bad_frame(operation, node, "granted more before data flowed")
                self._words.fail(operation, error, broken=True)
        elif isinstance(frame, Withdraw):
            self._admission.withdraw_came(operation, peer, frame)
        elif isinstance(frame, Withdrawn):
            self._admission.withdrawn_came(operation, peer, frame)
        elif isinstance(frame, Differs):
            self._disputes.differs(operation, peer, frame)
        elif isinstance(frame, Queued):
            self._here(operation, peer, frame.stamp)
            group.keeper.flush_to(node, peer)
        elif isinstance(frame, Kept):
            self._words.kept_came(operation)
        elif isinstance(frame, Arrived):
            view.ranks = tuple(rank for rank in group.members[peer].ranks if rank in frame.ranks)
            view.asked = True
            self._tell_arrived(operation, to_all=False)
            if group.left:
                self._departures.check(operation)

    def _confirmed(self, group: Group, peer: int, serials: tuple[int, ...]) -> None:
        for kept in group.keeper.confirmed(peer, serials):
            self._ending.settle(kept)

    def stop_forgetting(self, group: Group) -> None:
        """Forget no more names, for the group is over or nearly so."""
        self._resume(group, group.forgetting.give_up())

    def _resume(self, group: Group, held: list[Held]) -> None:
        for one in held:
            if isinstance(one, Submitted):
                self.submit(group, one)
            else:
                self.frame(group, *one)

    def ranks_left(self, group: Group, ranks: tuple[int, ...]) -> None:
        """Take note that ranks left on purpose: what still lacks them fails."""
        self.stop_forgetting(group)
        group.left.update(ranks)
        for rank in ranks:
            place = group.place.get(rank)
            if place is not None:
                for uses in group.uses.values():
                    uses[place] = GONE
        for key, outcome in list(group.outcomes.items()):
            outcome.waiting.difference_update(ranks)
            if not outcome.waiting:
                del group.outcomes[key]
        for operation in list(group.operations.values()):
            if operation.peers and any(submit is not None and submit.rank in ranks for submit in operation.submits):
                # What such a rank submitted stays valid, which the others must know before they miss it.
                self._tell_arrived(operation, to_all=True)
            self._departures.check(operation)

    def _hold(self, forgetting: Forgetting, submit: Submitted) -> None:
        forgetting.held.append(submit)
        if not 0 <= forgetting.wake <= submit.deadline_at:
            self._timers.set(forgetting, submit.deadline_at)

    def round_overdue(self, forgetting: Forgetting) -> AllReducedError | None:
        """Return why the group cannot go on, if a submit waited for a round until its deadline.

        The round must not end for this member alone, or its calls would meet others than they should.
        """
        deadline = forgetting.deadline
        if deadline <= self._context.now:
            return wording.round_unanswered(forgetting.group, forgetting.silent)
        if deadline < inf:
            self._timers.set(forgetting, deadline)
        return None

    def overdue(self, operation: Operation) -> None:
        """Handle the operation's time: first ask who arrived, then give up."""
        now = self._context.now
        if operation.state in ENDED:
            return
        if operation.disputed < inf:
            if now < operation.disputed:
                self._timers.set(operation, operation.disputed)
            else:
                self._disputes.settle(operation, now=True)
            if now < operation.deadline:
                return
        if operation.state in ENDED:
            return
        if now < operation.deadline and operation.spoiled is not None:
            self._words.overdue(operation, operation.spoiled)
            return
        if now < operation.deadline:
            operation.told = True
            self._tell_arrived(operation, to_all=True)
            self._timers.set(operation, operation.deadline)
            return
        waited = max(operation.deadline - operation.opened, 0.0)
        if operation.absent == 0 and operation.state in (State.QUEUED, State.MAPPING):
            error = wording.waits_for_memory(operation, waited, self._context.node)
        else:
            error = wording.deadline(operation, waited, self._late_nodes(operation))
        self._words.overdue(operation, error)

    def _refuse(self, submit: Submitted, error: AllReducedError) -> None:
        self._context.out.append(Fail(submit.client, submit.request, error))

    def _open(self, group: Group, name: str, use: int) -> Operation:
        operation = Operation(group, name, use, self._context.number(), self._context.now)
        group.operations[name, use] = operation
        return operation

    def _take_time(self, operation: Operation, submit: Submitted) -> None:
        now = self._context.now
        if operation.missing + 1 == len(operation.submits):
            operation.opened = now
        if submit.deadline_at < operation.deadline:
            operation.deadline = submit.deadline_at
            asks = operation.peers and not operation.told
            warn = now + min(1.0, (submit.deadline_at - now) / 2) if asks else submit.deadline_at
            self._timers.sooner(operation, max(warn, now))

    def _check(self, operation: Operation, submit: Submitted) -> AllReducedError | None:
        """Compare a submit with what can be; returns what is wrong with it."""
        fingerprint = submit.fingerprint
        plan = operation.plan
        if plan is None:
            plan = operation.plan = plan_for(operation.group, fingerprint)
            if plan.error is not None:
                return plan.error
        wanted = plan.nbytes
        if not wanted or (plan.broadcast and submit.rank != fingerprint.root):
            return None
        given = submit.source.nbytes if submit.source is not None else 0
        return None if given == wanted else wording.bad_source(operation, submit.rank, given, wanted)

    def _find_or_open(self, group: Group, peer: int, frame: OperationFrame) -> Operation | None:
        """Return the operation that a frame opens; None where it ended here, or was never there."""
        key = (frame.name, frame.use)
        ended = group.over(key)
        if not ended and isinstance(frame, _OPENING):
            operation = self._open(group, frame.name, frame.use)
            bound = self._context.limits.operations * len(group.members)
            if len(group.operations) > bound:
                self._words.fail(operation, wording.too_many(operation, bound))
                return None
            return operation
        if isinstance(frame, Withdraw) and ended and key not in group.failures:
            # It ended well here: data was sent, or is being sent.
            self._context.counters["frames_ignored"] += 1
            self._admission.answer(group, peer, frame, accepted=False)
            return None
        self._words.answer(group, peer, frame)
        return None

    def _ready(self, operation: Operation, peer: int, frame: Ready) -> None:
        view, group = operation.peers[peer], operation.group
        if frame.attempt <= view.attempt:
            self._context.counters["frames_ignored"] += 1
            return
        if view.ready is not None:
            node = group.members[peer].node
            self._words.fail(operation, wording.bad_frame(operation, node, "was ready twice"), broken=True)
            return
        view.attempt = frame.attempt
        view.ready = frame
        view.fingerprint = frame.fingerprint
        operation.unready -= 1
        if operation.disputed < inf:
            self._disputes.settle(operation)
            return
        if self._disputes.disagrees(operation, frame.fingerprint):
            self._disputes.dispute(operation)
            return
        self._here(operation, peer, frame.stamp)
        if operation.state is State.READY and operation.unready == 0:
            self._admission.ready_came(operation)

    def _here(self, operation: Operation, peer: int, stamp: tuple[int, ...]) -> None:
        """All ranks of the peer arrived; it may know the stamp."""
        view, context = operation.peers[peer], self._context
        moved = False
        if not view.here:
            view.here = True
            operation.absent -= 1
            moved = True
        if peer == 0 and len(stamp) == 3 and not operation.stamp:
            operation.stamp = stamp
            context.clock = max(context.clock, stamp[1])
            moved = True
        if moved and operation.state is State.QUEUED:
            self._admission.moved(operation)
        if operation.group.left:
            self._departures.check(operation)

    def _tell_arrived(self, operation: Operation, *, to_all: bool) -> None:
        """Tell others which local ranks are here: all members, or those that asked. READY and Queued tell it anyway."""
        group = operation.group
        if operation.missing == 0 and not to_all and operation.state is not State.MAPPING:
            return
        ranks = operation.arrived_ranks()
        frame = Arrived(group.number, group.generation, operation.name, operation.use, ranks)
        for node, member in group.others:
            view = operation.peers[member]
            if view.told_ranks != len(ranks) and (to_all or (view.asked and ranks)):
                view.told_ranks = len(ranks)
                self._context.out.append(SendFrame(node, frame))

    def _late_nodes(self, operation: Operation) -> list[str]:
        """Return the nodes that keep the operation from going on, where all ranks arrived."""
        members = operation.group.members
        if operation.unready:
            return [
                member.node
                for member, view in zip(members, operation.peers, strict=False)
                if view.ready is None and member is not operation.group.me
            ]
        if operation.execution is None:
            return []
        return [members[peer].node for peer in operation.execution.unserved()]
