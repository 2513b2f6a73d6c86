"""The state of one operation on this node."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from allreduced.core.errors import AllReducedError
from allreduced.core.identity import Member, OperationKey
from allreduced.daemon.engine.events import Submitted
from allreduced.daemon.engine.memory import Allocation
from allreduced.daemon.engine.region import Region
from allreduced.protocol.peer import MAX_CALLS, Call, Fingerprint, Ready

if TYPE_CHECKING:
    from allreduced.daemon.engine.execution import Execution
    from allreduced.daemon.engine.flights import Fetched, Posting, Sending, Served
    from allreduced.daemon.engine.group import Group
    from allreduced.daemon.engine.leases import Holder
    from allreduced.daemon.engine.plan import Plan
    from allreduced.daemon.engine.solo import Solo


class State(enum.Enum):
    """Where an operation stands on this node; ``STATES`` says what each means."""

    GATHERING = "gathering"
    QUEUED = "queued"
    MAPPING = "mapping"
    READY = "ready"
    WITHDRAWING = "withdrawing"
    RELEASING = "releasing"
    RUNNING = "running"
    BROKEN = "broken"
    RESTARTING = "restarting"
    FETCHING = "fetching"
    DELIVERED = "delivered"
    FAILED = "failed"


STATES: Mapping[State, str] = {
    State.GATHERING: "ranks of this node are missing",
    State.QUEUED: "all ranks of this node are here; it waits for memory",
    State.MAPPING: "memory is reserved; an arena is being made",
    State.READY: "READY was sent; that of a peer is missing",
    State.WITHDRAWING: "READY is being taken back; peers have not answered",
    State.RELEASING: "READY was taken back; posted receives are being cancelled",
    State.RUNNING: "all are ready; tiles move, or the result is here and must not be delivered yet",
    State.BROKEN: "what a peer sent spoiled it; the others have not said how it ended there",
    State.RESTARTING: "the generation ended; what was under way in it is being cancelled, then it starts again",
    State.FETCHING: "the generation ended and another member has the result, which is to be had from there",
    State.DELIVERED: "the ranks of this node have their result, which is kept until all members have confirmed theirs",
    State.FAILED: "ended with an error; waits until nothing uses its memory",
}
"""What the states of an operation mean."""

STARTED = (State.RUNNING, State.DELIVERED)
ENDED = (State.DELIVERED, State.FAILED)


class Verdict:
    """What members said about an operation that one of them wants to fail.

    While there is one and nobody has ``kept`` the result, it is not delivered.
    """

    __slots__ = ("kept", "words")

    def __init__(self) -> None:
        self.kept = False
        """A member has delivered it."""
        self.words: dict[int, AllReducedError] = {}
        """By member, this one included: the error with which it wants to fail it."""


class PeerView:
    """What one other member told about the operation, and what it was told."""

    __slots__ = (
        "asked",
        "attempt",
        "calls",
        "fingerprint",
        "here",
        "ranks",
        "ready",
        "refused",
        "told_attempt",
        "told_ranks",
        "waiting",
    )

    def __init__(self) -> None:
        self.ready: Ready | None = None
        """The READY that holds, None if there is none or it was withdrawn."""
        self.fingerprint: Fingerprint | None = None
        """What its ranks called, also after a withdrawal."""
        self.attempt = 0
        """The highest attempt seen."""
        self.here = False
        """All its ranks submitted (it sent READY or Queued once)."""
        self.ranks: tuple[int, ...] = ()
        """The ranks of it that submitted, where it told."""
        self.told_attempt = 0
        """The attempt of the own READY that it holds."""
        self.told_ranks = -1
        """How many local ranks it was told to be here, -1 where nothing was told."""
        self.waiting = False
        """It has not answered Withdraw yet."""
        self.refused = False
        self.asked = False
        """It wants to know who arrived here."""
        self.calls: tuple[Call, ...] = ()
        """What its ranks called, where it told because calls differ."""

    @property
    def tag(self) -> int:
        """The tag of data for the receives of its READY."""
        return self.ready.generation << 32 | self.ready.attempt if self.ready else 0


class Operation:
    """One collective call. Who mutates it: matching (arrivals), admission (memory, READY), execution, ending."""

    __slots__ = (
        "absent",
        "attempt",
        "deadline",
        "disputed",
        "doomed",
        "error",
        "execution",
        "fetched",
        "fingerprint",
        "group",
        "holder",
        "holders",
        "known",
        "missing",
        "name",
        "opened",
        "outstanding",
        "parts",
        "peers",
        "pinned",
        "plan",
        "postings",
        "priority",
        "queued_told",
        "result",
        "scratch",
        "sendings",
        "seq",
        "serial",
        "source_readers",
        "spoiled",
        "stamp",
        "state",
        "submits",
        "times",
        "told",
        "unconfirmed",
        "unready",
        "use",
        "verdict",
        "wake",
    )

    def __init__(self, group: Group, name: str, use: int, seq: int, known: float) -> None:
        ranks = len(group.ranks)
        self.group = group
        self.name = name
        self.use = use
        self.seq = seq
        """Place in the order of opening on this node."""
        self.known = known
        """Time of its first sign here: a local submit, or a frame of another member."""
        self.state = State.GATHERING
        self.submits: list[Submitted | None] = [None] * ranks
        """By place of the rank in ``group.ranks``; emptied when they are answered."""
        self.times = [0.0] * ranks
        self.missing = ranks
        """Local ranks that did not submit yet."""
        self.fingerprint: Fingerprint | None = None
        self.plan: Plan | None = None
        """What the fingerprint means; set at the first local submit."""
        self.priority = 0
        self.opened = 0.0
        """Time of the first local submit."""
        self.deadline = math.inf
        self.disputed = math.inf
        """Calls differ: until when to wait for the rest of them, so that the error names all. Nothing starts."""
        self.wake = math.inf
        """When the timer looks at this operation next."""
        self.stamp: tuple[int, ...] = ()
        others = len(group.members) - 1
        self.peers = [PeerView() for _ in group.members] if others else []
        self.absent = others
        """Other members of which not all ranks are known to have submitted."""
        self.unready = others
        """Other members whose READY is not held."""
        self.attempt = 0
        self.told = False
        """This node waited long and asked who arrived."""
        self.queued_told = False
        self.pinned = False
        """A peer refused a withdrawal: it has begun to send, the memory must stay."""
        self.execution: Execution | Solo | None = None
        self.result: Allocation | None = None
        """The result's memory in an arena of the group; None where it is small and lies in ``scratch``."""
        self.scratch: Allocation | None = None
        self.holder: Holder | None = None
        """The result's memory after delivery, shared with its leases."""
        self.postings: dict[int, Posting] = {}
        self.fetched: Fetched | None = None
        """The receive of a result that another member has."""
        self.holders: Sequence[str] = ()
        """Nodes that have the result, where it is to be fetched."""
        self.sendings: dict[int, Sending | Served] = {}
        self.outstanding = 0
        """Jobs, sends and cancelled receives whose completion is due."""
        self.source_readers = 0
        """Jobs and sends that read a client's input."""
        self.error: AllReducedError | None = None
        self.serial = 0
        """This member's count of the operations that it was ready for, 0 where it was not."""
        self.unconfirmed = 0
        """A bit for each other member that is not known to have the result; set with the serial."""

        self.parts: tuple[Operation, ...] = ()
        """Operations for further dtypes of the same list, as far as local ranks have called them."""
        self.verdict: Verdict | None = None
        self.spoiled: AllReducedError | None = None
        """What a peer sent that makes no sense."""
        self.doomed: AllReducedError | None = None
        """Why it is to fail as soon as the members have agreed on the end of the generation."""

    @property
    def done(self) -> bool:
        """Whether the result is here and no input is read any more."""
        execution = self.execution
        return self.state is State.RUNNING and (execution is None or (execution.final and self.source_readers == 0))

    @property
    def mapped(self) -> bool:
        """Whether the memory that it has exists already."""
        return all(memory is None or memory.arena.ready for memory in (self.result, self.scratch))

    @property
    def region(self) -> Region | None:
        """Where the result is, if there is memory for it."""
        nbytes = self.plan.nbytes if self.plan is not None else 0
        memory = self.result or self.scratch
        return memory.region(0, nbytes) if memory is not None and nbytes else None

    def begin_again(self, before: Sequence[Member]) -> None:
        """Forget what happened between members, for a new generation. The submits stay, here and elsewhere.

        ``before``: the members of the last generation.
        """
        group = self.group
        others = len(group.members) - 1
        known = {
            member.node: member.ranks if view.here else view.ranks
            for member, view in zip(before, self.peers, strict=False)
        }
        self.peers = [PeerView() for _ in group.members] if others else []
        for member, view in zip(group.members, self.peers, strict=False):
            view.ranks = known.get(member.node, ())
        self.absent = self.unready = others
        self.state = State.GATHERING
        self.disputed = math.inf
        self.attempt = self.serial = self.unconfirmed = 0
        self.told = self.queued_told = self.pinned = False
        self.verdict = self.doomed = self.spoiled = None
        if group.mine or self.submits[0] is None:
            self.stamp = ()

    @property
    def key(self) -> tuple[str, int]:
        """What names the operation within its group."""
        return (self.name, self.use)

    @property
    def label(self) -> str:
        """How messages call the operation."""
        return OperationKey(self.group.number, self.name, self.use).label()

    def order(self) -> tuple[object, ...]:
        """Return the place in the order in which memory is served.

        Operations whose ranks all arrived, everywhere, come first, by stamp: these are the same on all members. Then
        those with a stamp, then those without, in the order in which they were opened here.
        """
        if not self.stamp:
            return (1, 1, (self.seq,), 0, "", 0)
        return (1 if self.absent else 0, 0, self.stamp, self.group.number, self.name, self.use)

    def arrived_ranks(self) -> tuple[int, ...]:
        """Return the local ranks that submitted."""
        return tuple(rank for rank, submit in zip(self.group.ranks, self.submits, strict=True) if submit is not None)

    def missing_ranks(self) -> tuple[int, ...]:
        """Return the ranks of the group that are not known to have submitted."""
        missing = [rank for rank, submit in zip(self.group.ranks, self.submits, strict=True) if submit is None]
        for member, view in zip(self.group.members, self.peers, strict=False):
            if member is not self.group.me and not view.here:
                missing += [rank for rank in member.ranks if rank not in view.ranks]
        return tuple(sorted(missing))

    def calls(self) -> tuple[Call, ...]:
        """Return what local ranks called, so many different calls as a frame tells."""
        ranks: dict[Fingerprint, list[int]] = {}
        for submit in self.submits:
            if submit is not None:
                ranks.setdefault(submit.fingerprint, []).append(submit.rank)
        return tuple(Call(fingerprint, tuple(sorted(held))) for fingerprint, held in ranks.items())[:MAX_CALLS]
