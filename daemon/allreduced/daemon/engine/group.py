"""The state of one formed group on this node."""

from __future__ import annotations

import re
from math import inf
from typing import TYPE_CHECKING, Final

from allreduced.core.errors import AllReducedError, MismatchError
from allreduced.daemon.engine.events import GroupStarted
from allreduced.daemon.engine.lateness import Lateness
from allreduced.daemon.engine.operation import Operation
from allreduced.protocol.change import Change
from allreduced.protocol.peer import Fingerprint

if TYPE_CHECKING:
    from allreduced.daemon.engine.forgetting import Forgetting
    from allreduced.daemon.engine.kept import Keeper
    from allreduced.daemon.engine.lists import ListCall
    from allreduced.daemon.engine.plan import Plan


FURTHER: Final = re.compile(r"/[a-z]+[0-9]*#[0-9]+$")
"""What names of operations for further dtypes of a list have after the name of the call: see docs/protocol.md."""

FAILURES = 1024
"""Failed operations of a group that are remembered, a count."""


class Outcome:
    """How an ended operation ended, for the local ranks that come late. Goes when the last of them had it."""

    __slots__ = ("error", "waiting")

    def __init__(self, error: AllReducedError, waiting: set[int]) -> None:
        self.error = error
        self.waiting = waiting


class Group:
    """Members, ranks, use counts and operations of a group."""

    __slots__ = (
        "cut_off",
        "departed",
        "doubtful",
        "ending",
        "error",
        "failures",
        "forgetting",
        "forgotten",
        "fresh_until",
        "frozen",
        "generation",
        "gone",
        "keeper",
        "key",
        "lateness",
        "left",
        "lists",
        "local",
        "me",
        "member_of",
        "members",
        "mine",
        "number",
        "operations",
        "others",
        "outcomes",
        "place",
        "plans",
        "present",
        "ranks",
        "size",
        "tile_bytes",
        "uses",
    )

    def __init__(self, started: GroupStarted) -> None:
        self.number = started.group
        self.key = started.key
        self.generation = started.generation
        self.tile_bytes = started.tile_bytes
        self.members = started.members
        self.mine = started.mine
        self.me = started.members[started.mine]
        self.local = dict(started.local)
        self.ranks = self.me.ranks
        self.place = {rank: index for index, rank in enumerate(self.ranks)}
        self.size = started.size
        self.lateness = Lateness(len(self.ranks))
        self.member_of = {member.node: index for index, member in enumerate(started.members) if index != started.mine}
        self.others = tuple(self.member_of.items())
        """(node, member index) of the other members, in order."""
        self.departed: set[int] = set()
        """Members that are proven to be dead, or said goodbye."""
        self.present = sum(1 << index for _, index in self.others)
        """A bit for each other member that has not departed."""
        self.fresh_until = -inf
        """Until when results may be delivered without looking at who was heard last."""
        self.keeper: Keeper
        """Keeps results for others. Set by matching."""
        self.uses: dict[str, list[int]] = {}
        """By name: the next use of each local rank."""
        self.forgetting: Forgetting
        """Drops those that are not used any more. Set by matching."""
        self.plans: dict[Fingerprint, Plan] = {}
        self.operations: dict[tuple[str, int], Operation] = {}
        self.ending: dict[tuple[str, int], Operation] = {}
        """Ended operations whose memory is still in use."""
        self.failures: dict[tuple[str, int], tuple[float, AllReducedError]] = {}
        """When and how operations failed, the last ones: others may not know. Where there are no others, only those for
        which no local rank is waited for."""
        self.frozen = False
        """The members agree on the end of this generation: nothing is delivered, and nothing fails, until they have."""
        self.cut_off = False
        """This member agrees on nothing with the others any more."""
        self.doubtful: dict[tuple[str, int], int] = {}
        """Of a group that is cut off: what was delivered, with the bits of members that may not have it."""
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.lists: dict[int, ListCall] = {}
        """By place of a local rank: the list of several dtypes that it called last."""
        self.gone: set[int] = set()
        """Clients of this group whose connection ended: they can hold no leases any more."""
        self.left: set[int] = set()
        """Ranks of the whole group that left on purpose."""
        self.error: AllReducedError | None = None
        self.forgotten = False

    @property
    def label(self) -> str:
        """How messages call the group."""
        return f"group {self.key.name!r} of job {self.key.job!r}" if self.key.job else f"group {self.key.name!r}"

    @property
    def busy(self) -> bool:
        """True while an operation that a local rank submitted goes on, or one that ended here still uses memory.

        Nobody waits for what a group had under way from which this node is cut off.
        """
        if self.cut_off:
            return False
        return bool(self.ending) or any(
            operation.missing < len(operation.submits) for operation in self.operations.values()
        )

    def ended(self, name: str, use: int) -> bool:
        """Return whether every local rank submitted this use already (and the operation is not in flight any more)."""
        uses = self.uses.get(name)
        return uses is not None and use < min(uses)

    def over(self, key: tuple[str, int]) -> bool:
        """Return whether an operation that is not in flight has been, so that nothing may open it anew."""
        return key in self.outcomes or key in self.failures or self.ended(*key)

    def ended_before(
        self, key: tuple[str, int], now: float, error: AllReducedError, waiting: set[int], *, bound: float = inf
    ) -> None:
        """Keep how an operation failed for the local ranks that have not called it yet.

        Those of a list that differs may never call it: they have called its first operation, and know already. So this
        is kept as long as it is among the last failures. ``bound``: outcomes that may be kept.
        """
        listed = isinstance(error, MismatchError) and FURTHER.search(key[0]) is not None
        if listed or self.others:
            self.failed(key, now, error)
        if waiting and not listed and len(self.outcomes) < bound:
            self.outcomes[key] = Outcome(error, waiting)

    def told_late(self, key: tuple[str, int], rank: int) -> AllReducedError | None:
        """Return how an operation failed before a local rank calls it; None where it has not.

        It is told once, but for parts of lists that differ: those are known while they are among the last failures.
        """
        outcome = self.outcomes.get(key)
        if outcome is None:
            failure = self.failures.get(key)
            return None if failure is None else failure[1]
        outcome.waiting.discard(rank)
        if not outcome.waiting:
            del self.outcomes[key]
        return outcome.error

    def adopt(self, change: Change, mine: int) -> None:
        """Begin the next generation with the members that go on. The local ranks stay those that they were."""
        self.generation = change.generation
        self.members = change.members
        self.mine = mine
        self.me = change.members[mine]
        self.size = sum(len(member.ranks) for member in change.members)
        self.member_of = {member.node: index for index, member in enumerate(change.members) if index != mine}
        self.others = tuple(self.member_of.items())
        self.present = sum(1 << index for _, index in self.others)
        self.departed.clear()
        self.fresh_until = -inf
        self.frozen = False
        self.plans.clear()

    def failed(self, key: tuple[str, int], now: float, error: AllReducedError) -> None:
        """Take note that an operation failed."""
        failures = self.failures
        failures.pop(key, None)
        failures[key] = (now, error)
        if len(failures) > FAILURES:
            del failures[next(iter(failures))]
