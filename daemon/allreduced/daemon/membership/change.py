"""How the members of one generation agree on its end: one Paxos decision, seen by one member, sans-IO.

Every member is an acceptor and may be the proposer. ``MESSAGES`` says what each frame does and ``TURNS`` what a
proposer does next; docs/failure.md has the same tables, and why this is safe.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from allreduced.daemon import quorum
from allreduced.daemon.engine.actions import Frozen
from allreduced.daemon.engine.events import Freeze
from allreduced.daemon.membership import ballot as ballots
from allreduced.daemon.membership.actions import SendFrame, TellEngine
from allreduced.daemon.membership.ballot import NONE, Acceptor, Ballot, ballot_of
from allreduced.daemon.membership.instance import Instance, State
from allreduced.daemon.membership.merge import merge
from allreduced.daemon.membership.scene import Scene, Standing
from allreduced.protocol.change import Accept, Accepted, Change, ChangeFrame, Committed, Prepare, Promise, Trouble


class Phase(enum.Enum):
    """Where a member is as a proposer."""

    WAITING = "another member proposes, or its own turn has not come"
    PREPARING = "it proposes, and collects promises"
    ACCEPTING = "a quorum has promised; it collects acceptances of one change"
    DECIDED = "a quorum has accepted: the change holds"


@dataclass(frozen=True, slots=True)
class Hopeless:
    """No quorum of the generation can be reached: this member is cut off."""


HOPELESS = Hopeless()
Outcome: TypeAlias = "Change | Hopeless | None"
"""What a step led to: the decided change, the insight that there will be none here, or nothing yet."""

TURNS: Mapping[tuple[Phase, str], tuple[Phase, str]] = {
    (Phase.WAITING, "no lower member can be reached"): (Phase.PREPARING, "Prepare to all, with the next attempt"),
    (Phase.WAITING, "its turn comes by the clock"): (Phase.PREPARING, "Prepare to all, with the next attempt"),
    (Phase.PREPARING, "all that may live have promised: a quorum"): (
        Phase.ACCEPTING,
        "accepts the change itself, then Accept to all",
    ),
    (Phase.PREPARING, "… a quorum, if all knew who has departed"): (
        Phase.PREPARING,
        "tells them (Trouble), and asks those again",
    ),
    (Phase.PREPARING, "… no quorum"): (Phase.WAITING, "cut off: the group ends here"),
    (Phase.PREPARING, "a reachable member does not answer"): (Phase.PREPARING, "Prepare to all, with the next attempt"),
    (Phase.PREPARING, "a higher ballot comes"): (Phase.WAITING, "promises it"),
    (Phase.ACCEPTING, "a quorum has accepted"): (Phase.DECIDED, "Committed to all; installs the change"),
    (Phase.ACCEPTING, "time passes without a quorum"): (Phase.PREPARING, "Prepare to all, with the next attempt"),
    (Phase.ACCEPTING, "a higher ballot comes"): (Phase.WAITING, "promises it"),
}
"""(phase, what happens) to (phase, what it does)."""

MESSAGES: Mapping[type, tuple[str, str]] = {
    Trouble: (
        "a member that sees a loss or a reset link, to all",
        "notes who is proven to be dead and takes no more frames of those; takes part in the change",
    ),
    Prepare: (
        "a proposer, to all",
        "where no higher ballot was promised: promises it and freezes the generation in its engine (once); answers",
    ),
    Promise: (
        "an acceptor, frozen, to the proposer",
        "counts it, with all that the acceptor has of the generation, and the change that it accepted before, if any",
    ),
    Accept: (
        "a proposer with the promises of a quorum, to all",
        "where no higher ballot was promised: accepts the change, answers",
    ),
    Accepted: ("an acceptor, to the proposer", "counts it"),
    Committed: (
        "the proposer, once a quorum has accepted, then whoever learns it, to all, once; and when a link is back",
        "installs the change, whatever it promised",
    ),
}
"""Frame to (who sends it to whom, what the receiver does)."""


MOST_DOUBLINGS = 2
"""How often the time that a proposer waits for answers doubles: to half the failure timeout, for the lowest member."""


class Agreement:
    """The part of this node in the change of an instance's current generation.

    Frames and the engine's Freeze go to the scene's actions. Every method that may decide returns its outcome.
    """

    def __init__(self, scene: Scene, instance: Instance) -> None:
        self._scene = scene
        self._instance = instance
        self._timing = scene.timing
        self._acceptor = Acceptor()
        self._frozen: Frozen | None = None
        self._freezing = False
        self.phase = Phase.WAITING
        self._attempt = 0
        """The highest attempt that was seen."""
        self._tries = 0
        """How often this member has proposed."""
        self._ballot = NONE
        self._promises: dict[int, Promise] = {}
        self._departed: frozenset[int] = frozenset()
        """Who had departed for all that promised: whose vote phase two can do without."""
        self._change: Change | None = None
        self._votes: set[int] = set()
        self._at: float | None = None
        """When this member proposes (again)."""

    @property
    def due(self) -> float | None:
        """When :meth:`time_passed` is due."""
        return self._at

    @property
    def proposer(self) -> int:
        """The place of the member whose ballot was promised last; -1 if none was."""
        return self._acceptor.promised.proposer if self._acceptor.promised != NONE else -1

    def awaited(self) -> tuple[str, ...]:
        """Return the nodes whose part is missing: promises or acceptances here, else the proposer's next frame."""
        match self.phase:
            case Phase.WAITING:
                places = [self.proposer] if self._led() else []
            case Phase.PREPARING:
                places = self._missing()
            case _:
                votes = self._votes | self._departed
                places = [place for place in self._others() if place not in votes]
        return tuple(self._instance.members[place].node for place in places)

    # What happens around

    def reconsider(self, now: float) -> Outcome:
        """Look again at whose turn it is, and at whom the proposer waits for: the standing of a member changed."""
        if self.phase is Phase.WAITING:
            if not self._led() and self._turn() == 0:
                return self._propose(now)
            self._at = min(now + self._patience(), self._at if self._at is not None else float("inf"))
            return None
        return self._advance(now) if self.phase is Phase.PREPARING else None

    def link_back(self, place: int) -> None:
        """Send again what may have been lost with the link to a member."""
        self._tell(place, self._trouble())
        if self.phase is Phase.PREPARING and place not in self._promises:
            self._tell(place, self._prepare())
        elif self.phase is Phase.ACCEPTING and place not in self._votes and self._change is not None:
            self._tell(place, self._accept(self._change))
        elif self.proposer == place and self._frozen is not None:
            self._tell(place, self._promise(self._acceptor.promised))

    def time_passed(self, now: float) -> Outcome:
        """Propose, if the time has come; again where the last attempt leads nowhere."""
        if self._at is None or now < self._at:
            return None
        if self.phase is Phase.PREPARING and not self._late():
            self._at = now + self._answers()  # those that it waits for have no link, and time will tell
            return None
        return self._propose(now)

    def frozen(self, frozen: Frozen, now: float) -> Outcome:
        """Take what the engine has of the generation, and give the promise that waits for it."""
        if frozen.generation != self._instance.generation or self._frozen is not None:
            return None
        self._frozen = frozen
        return self._give_promise(now)

    # Frames

    def arrived(self, place: int, frame: ChangeFrame, now: float) -> Outcome:
        """Take a frame of this generation from the member at ``place``, which has not departed."""
        match frame:
            case Trouble():
                return self.reconsider(now)
            case Prepare() if frame.proposer == place:
                return self._prepare_arrived(ballot_of(frame), now)
            case Promise() if self.phase is Phase.PREPARING and ballot_of(frame) == self._ballot:
                self._promises[place] = frame
                return self._advance(now)
            case Accept() if frame.proposer == place:
                self._accept_arrived(ballot_of(frame), frame.change, now)
            case Accepted() if self.phase is Phase.ACCEPTING and ballot_of(frame) == self._ballot:
                self._votes.add(place)
                return self._count()
            case _:
                pass
        return None

    def _prepare_arrived(self, ballot: Ballot, now: float) -> Outcome:
        self._attempt = max(self._attempt, ballot.attempt)
        if not self._acceptor.promise(ballot):
            return None
        self._step_down(now)
        return self._give_promise(now)

    def _accept_arrived(self, ballot: Ballot, change: Change, now: float) -> None:
        self._attempt = max(self._attempt, ballot.attempt)
        # Who is not frozen has promised nothing, and might still deliver what the change does not know of.
        if self._frozen is None or not self._acceptor.accept(ballot, change):
            return
        self._step_down(now)
        group, (generation, attempt, proposer) = self._instance.group, ballot
        self._tell(proposer, Accepted(group, generation, attempt, proposer))

    def _step_down(self, now: float) -> None:
        self.phase = Phase.WAITING
        self._promises.clear()
        self._at = now + self._patience()

    # Proposing

    def _propose(self, now: float) -> Outcome:
        self._attempt += 1
        self._tries += 1
        self.phase = Phase.PREPARING
        self._ballot = Ballot(self._instance.generation, self._attempt, self._instance.mine)
        self._promises.clear()
        self._change = None
        self._at = now + self._answers()
        self._acceptor.promise(self._ballot)
        for place in self._others():
            self._tell(place, self._trouble())
            self._tell(place, self._prepare())
        return self._give_promise(now)

    def _give_promise(self, now: float) -> Outcome:
        """Give the promise of the highest ballot, once nothing more is delivered in this generation."""
        if self._frozen is None:
            if not self._freezing:
                self._freezing = True
                freeze = Freeze(self._instance.group, self._instance.generation)
                self._scene.out.append(TellEngine(freeze))
            return None
        promised = self._acceptor.promised
        if promised.proposer != self._instance.mine:
            self._tell(promised.proposer, self._promise(promised))
            return None
        return self._advance(now) if self.phase is Phase.PREPARING else None

    def _advance(self, now: float) -> Outcome:
        """Propose a change once every member that may live has promised, if these may decide."""
        instance = self._instance
        if self._frozen is None or self._missing():
            return None
        self._promises[instance.mine] = self._promise(self._ballot)
        known = set(instance.departed)
        # Nobody may hear the last words of a member whose vote is not needed: all must know that it has departed.
        common = known.intersection(*(self._departed_in(promise) for promise in self._promises.values()))
        members = len(instance.members)
        if not quorum.has_quorum(members, self._promises.keys(), common):
            if not quorum.has_quorum(members, self._promises.keys(), known):
                self.phase = Phase.WAITING
                return HOPELESS
            for place, promise in list(self._promises.items()):
                if not known <= self._departed_in(promise):
                    del self._promises[place]
                    self._tell(place, self._trouble())
                    self._tell(place, self._prepare())
            return self._advance(now)
        change = ballots.chosen(self._promises.values())
        if change is None:
            change = merge(
                instance.generation,
                instance.members,
                self._promises,
                policy=instance.policy,
                ended=instance.state is State.BROKEN,
                earlier=instance.losses,
            )
        # The proposer accepts first: while it lives, every quorum of all that live has this change in it.
        if not self._acceptor.accept(self._ballot, change):
            self._step_down(now)
            return None
        self.phase = Phase.ACCEPTING
        self._departed = frozenset(common)
        self._change = change
        self._votes = {instance.mine}
        self._at = now + self._answers()
        for place in self._others():
            self._tell(place, self._accept(change))
        return self._count()

    def _count(self) -> Outcome:
        if not quorum.has_quorum(len(self._instance.members), self._votes, self._departed):
            return None
        self.phase = Phase.DECIDED
        self._at = None
        return self._change

    # Whose turn it is

    def _others(self) -> list[int]:
        return [place for place in range(len(self._instance.members)) if place != self._instance.mine]

    def _missing(self) -> list[int]:
        """Return those that have not promised and may live."""
        alive = (Standing.UP, Standing.CUT)
        return [
            place
            for place in self._others()
            if place not in self._promises and self._scene.standing(self._instance, place) in alive
        ]

    def _late(self) -> bool:
        """Tell whether a member that can be reached has not promised, or the engine has not frozen."""
        up = [place for place in self._missing() if self._scene.standing(self._instance, place) is Standing.UP]
        return bool(up) or self._frozen is None

    def _led(self) -> bool:
        """Tell whether the member whose ballot was promised can still be reached."""
        proposer = self.proposer
        return 0 <= proposer != self._instance.mine and self._scene.standing(self._instance, proposer) is Standing.UP

    def _turn(self) -> int:
        """Return how many members that can be reached come before this one."""
        lower = range(self._instance.mine)
        return sum(self._scene.standing(self._instance, place) is Standing.UP for place in lower)

    def _patience(self) -> float:
        first = self._timing.failure_timeout / 2 if self._led() else 0.0
        return first + self._retry()

    def _retry(self) -> float:
        return self._timing.stagger * (1 + self._turn())

    def _answers(self) -> float:
        """Return how long answers are waited for: twice as long as for the try before.

        Each new try makes the answers to the one before worthless, and they may only be slow.
        """
        return self._retry() * 2.0 ** min(self._tries - 1, MOST_DOUBLINGS)

    # Frames to send

    def _tell(self, place: int, frame: ChangeFrame) -> None:
        if self._scene.standing(self._instance, place) is Standing.UP:
            self._scene.out.append(SendFrame(self._instance.members[place].node, frame))

    def _trouble(self) -> Trouble:
        return Trouble(self._instance.group, self._instance.generation, self._instance.known_losses())

    def _prepare(self) -> Prepare:
        generation, attempt, proposer = self._ballot
        return Prepare(self._instance.group, generation, attempt, proposer)

    def _accept(self, change: Change) -> Accept:
        generation, attempt, proposer = self._ballot
        return Accept(self._instance.group, generation, attempt, proposer, change)

    def _promise(self, ballot: Ballot) -> Promise:
        frozen, acceptor = self._frozen, self._acceptor
        if frozen is None:
            raise RuntimeError("a promise needs the engine's word")
        return Promise(
            group=self._instance.group,
            generation=ballot.generation,
            attempt=ballot.attempt,
            proposer=ballot.proposer,
            accepted_attempt=acceptor.accepted_in.attempt,
            accepted_proposer=acceptor.accepted_in.proposer,
            accepted=(acceptor.accepted,) if acceptor.accepted is not None else (),
            losses=self._instance.known_losses(),
            left=tuple(sorted(self._instance.left)),
            results=frozen.results,
            failures=frozen.failures,
            round=frozen.round,
            refused=frozen.refused,
        )

    def _departed_in(self, promise: Promise) -> set[int]:
        nodes = {loss.node for loss in promise.losses if loss.whole and loss.proven}
        return {place for place, member in enumerate(self._instance.members) if member.node in nodes}
