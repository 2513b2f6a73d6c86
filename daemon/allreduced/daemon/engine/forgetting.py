"""Names that are not used any more: their use counters are dropped, on all members at the same point of their order.

A counter may only go when every member drops it between the same two uses of the name, or calls would meet others than
they should. So the first member proposes names that are at rest, every member answers all others, and what nobody
refused is dropped by each as soon as it has all answers. Meanwhile none of them uses these names: submits wait, and so
do frames of members that have answered already (what they send about such a name now comes after their drop).
"""

from __future__ import annotations

import math
from collections.abc import Container
from itertools import islice
from typing import TypeAlias

from allreduced.daemon.engine.actions import SendFrame
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.events import Submitted
from allreduced.daemon.engine.group import Group
from allreduced.protocol.change import MAX_FORGET
from allreduced.protocol.peer import Forget, Forgettable, OperationFrame

MAX_NAMES_BYTES = 256 << 10
"""Bytes of the names of one proposal, far below what a frame may have."""

_EXAMINED = 4 * MAX_FORGET
"""Names that are looked at for one proposal at most."""

Held: TypeAlias = "Submitted | tuple[str, OperationFrame]"
"""A submit, or a frame with the node that it came from."""


class Forgetting:
    """The rounds of one group. ``frozen``: the names that must not be used here until the round is decided."""

    __slots__ = (
        "_answers",
        "_context",
        "_proposals",
        "_round",
        "_threshold",
        "frozen",
        "group",
        "held",
        "refused",
        "wake",
    )

    def __init__(self, context: Context, group: Group) -> None:
        self._context = context
        self.group = group
        self._round = 1
        """The round that is under way or comes next."""
        self._proposals: dict[int, Forget] = {}
        self._answers: dict[int, dict[int, tuple[int, ...]]] = {}
        """By round: what each other member refused, by its index. Of this round and the next one only."""
        self._threshold: float = context.limits.names_kept
        self.frozen: dict[str, int] = {}
        """With the place in the proposal."""
        self.held: list[Held] = []
        self.refused: tuple[int, ...] = ()
        """The places of the names that were kept in the last round that was decided."""
        self.wake = -1.0

    @property
    def decided(self) -> int:
        """How many rounds are decided here."""
        return self._round - 1

    @property
    def deadline(self) -> float:
        """When the first of the submits that wait for the round must have ended; infinite where none waits."""
        return min((one.deadline_at for one in self.held if isinstance(one, Submitted)), default=math.inf)

    @property
    def silent(self) -> tuple[str, ...]:
        """The nodes whose answers the round still lacks. The first member proposes and does not answer."""
        answers = self._answers.get(self._round, ())
        return tuple(node for node, index in self.group.others if index and index not in answers)

    def look(self) -> None:
        """Propose to forget something if there is much to forget. On a single node it is dropped at once."""
        group = self.group
        if len(group.uses) <= self._threshold or group.mine or self._round in self._proposals:
            return
        names = self._at_rest()
        if not names:
            self._postpone_next()
            return
        if not group.others:
            for name in names:
                del group.uses[name]
            self._forget_failures(names)
            self._context.counters["names_forgotten"] += len(names)
            return
        proposal = Forget(group.number, group.generation, self._round, tuple(names), tuple(names.values()))
        self._proposals[self._round] = proposal
        self._freeze(proposal, ())
        for node, _ in group.others:
            self._context.out.append(SendFrame(node, proposal))

    def frame(self, peer: int, frame: Forget | Forgettable) -> list[Held]:
        """Take a frame of another member; return what was held up and can go on now, in order."""
        known = self._answers.get(frame.round, {})
        fits = self._round <= frame.round <= self._round + 1 and self._threshold != math.inf
        if isinstance(frame, Forget):
            fits = fits and peer == 0 and len(frame.names) == len(frame.uses) and frame.round not in self._proposals
        else:
            fits = fits and peer != 0
        if not fits or peer in known:
            self._context.counters["frames_ignored"] += 1
            return []
        if isinstance(frame, Forget):
            self._proposals[frame.round] = frame
        else:
            self._answers.setdefault(frame.round, {})[peer] = frame.refused
        released: list[Held] = []
        while self._go_on():
            released += self.held
            self.held = []
        return released

    def holds(self, peer: int, frame: OperationFrame) -> bool:
        """Return whether a frame belongs to the time after the round, which is not decided here yet."""
        if frame.name not in self.frozen:
            return False
        return peer == 0 or peer in self._answers.get(self._round, ())

    def give_up(self) -> list[Held]:
        """Forget nothing more; return what was held up."""
        self._threshold = math.inf
        self.frozen.clear()
        self._proposals.clear()
        self._answers.clear()
        held, self.held = self.held, []
        return held

    def _go_on(self) -> bool:
        """Answer the proposal of this round if that is still to be done; True where the round is decided now."""
        group, number = self.group, self._round
        proposal = self._proposals.get(number)
        if proposal is None:
            return False
        answers = self._answers.setdefault(number, {})
        if group.mine and group.mine not in answers:
            refused = answers[group.mine] = self._refused(proposal)
            self._freeze(proposal, refused)
            answer = Forgettable(group.number, group.generation, number, refused)
            for node, _ in group.others:
                self._context.out.append(SendFrame(node, answer))
        if len(answers) + 1 < len(group.members):
            return False
        self._decide(proposal, {place for refused in answers.values() for place in refused})
        return True

    def settle(self, decided: int, refused: tuple[int, ...]) -> list[Submitted]:
        """Begin a generation: as many rounds are decided, and none is under way. Returns the submits that were held up.

        ``refused``: the names that were kept in the last of them, where this member has not decided it yet.
        """
        proposal = self._proposals.get(self._round)
        if decided == self._round and proposal is not None:
            self._decide(proposal, set(refused))
        self._round = max(self._round, decided + 1)
        self._proposals.clear()
        self._answers.clear()
        self.frozen.clear()
        held, self.held = self.held, []
        return [one for one in held if isinstance(one, Submitted)]

    def _forget_failures(self, names: Container[str]) -> None:
        """Drop how operations of names failed that begin anew: their numbers will be those of other operations."""
        for name, use in list(self.group.failures):
            if name in names:
                del self.group.failures[name, use]

    def _decide(self, proposal: Forget, kept: set[int]) -> None:
        """Drop the names of a proposal that nobody needs."""
        group, number = self.group, self._round
        self.refused = tuple(sorted(kept))
        dropped = set[str]()
        for place, name in enumerate(proposal.names):
            if place in kept:
                self._postpone(name)
            elif group.uses.pop(name, None) is not None:
                dropped.add(name)
        self._forget_failures(dropped)
        self._context.counters["names_forgotten"] += len(dropped)
        del self._proposals[number]
        self._answers.pop(number, None)
        self.frozen.clear()
        self._round += 1
        self._threshold = self._context.limits.names_kept
        if not dropped:
            self._postpone_next()

    def _postpone_next(self) -> None:
        """Try again only when there are many more names, for nothing could be dropped."""
        kept = self._context.limits.names_kept
        self._threshold = max(kept, len(self.group.uses) + kept // 8)

    def _freeze(self, proposal: Forget, refused: tuple[int, ...]) -> None:
        kept = set(refused)
        self.frozen = {name: place for place, name in enumerate(proposal.names) if place not in kept}

    def _at_rest(self) -> dict[str, int]:
        """Return the longest known names that nothing here uses, with their counts."""
        uses, busy = self.group.uses, self._busy()
        found: dict[str, int] = {}
        nbytes = 0
        for name in list(islice(uses, _EXAMINED)):
            counts = uses[name]
            if not name or name in busy or min(counts) != max(counts):
                self._postpone(name)
                continue
            nbytes += len(name.encode())
            if nbytes > MAX_NAMES_BYTES:
                break
            found[name] = counts[0]
            if len(found) == MAX_FORGET:
                break
        return found

    def _refused(self, proposal: Forget) -> tuple[int, ...]:
        uses, busy = self.group.uses, self._busy()
        refused = []
        for place, (name, count) in enumerate(zip(proposal.names, proposal.uses, strict=True)):
            counts = uses.get(name)
            if counts is None or not name or name in busy or min(counts) != count or max(counts) != count:
                refused.append(place)
        return tuple(refused)

    def _busy(self) -> set[str]:
        """Return the names of which something is under way here."""
        group = self.group
        return {name for keys in (group.operations, group.ending, group.outcomes) for name, _ in keys}

    def _postpone(self, name: str) -> None:
        """Look at a name again only after all others."""
        uses = self.group.uses
        if name in uses:
            uses[name] = uses.pop(name)
