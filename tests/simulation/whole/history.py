"""What happened in a run: a log for people, and the facts that the invariants are about."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.whole.process import Process

from allreduced.core.errors import AllReducedError
from allreduced.core.identity import Member
from allreduced.daemon.engine.events import GroupStarted
from allreduced.protocol.peer import Change


@dataclass(slots=True, eq=False)
class Request:
    """One call of one rank. Times are those of the agenda.

    ``operation``: its place in the plan. ``answers``: when, and the error or the bytes of the result (None: no data).
    """

    group: int
    rank: int
    operation: int
    name: str
    use: int
    seat: Seat | None
    client: Process
    submitted: float
    deadline: float
    taken: bool = False
    """The agent has it."""
    answers: list[tuple[float, AllReducedError | bytes | None]] = field(default_factory=list)

    @property
    def error(self) -> AllReducedError | None:
        """The error that ended it."""
        answer = self.answers[0][1] if self.answers else None
        return answer if isinstance(answer, AllReducedError) else None

    @property
    def has_result(self) -> bool:
        """True where it ended well."""
        return bool(self.answers) and not isinstance(self.answers[0][1], AllReducedError)


@dataclass(slots=True, eq=False)
class Seat:
    """What one start of an agent was told of one formed group. It is a member until it is ``cut_off``.

    ``installed``: by generation that ended, the change and when. ``delivered`` and ``failed``: by operation (name, use),
    the generation in which it ended here. ``departed``: members that it was told to count no more.
    """

    node: str
    incarnation: int
    agent: Process
    started: GroupStarted
    at: float
    generation: int
    members: tuple[Member, ...]
    installed: dict[int, tuple[Change, float]] = field(default_factory=dict)
    delivered: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)
    failed: dict[tuple[str, int], tuple[int, AllReducedError]] = field(default_factory=dict)
    departed: set[str] = field(default_factory=set)
    ended: bool = False
    """A change ended the group."""
    error: AllReducedError | None = None
    cut_off: float | None = None
    """When it was told that the group is over for it alone, or learned of a change without it."""
    learned: tuple[Change, float] | None = None
    """A change that does not include it."""
    forgotten: bool = False

    @property
    def group(self) -> int:
        """The number of the formed group."""
        return self.started.group


class History:
    """Everything that the checks need."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.seats: dict[tuple[int, str, int], Seat] = {}
        """By group, node, incarnation."""
        self.changes: dict[tuple[int, int], list[tuple[Seat, Change, float]]] = {}
        """By group and the generation that ended."""
        self.counts: Counter[str] = Counter()
        self.log: list[tuple[float, str, str, object]] = []
        self.violations: list[tuple[str, str]] = []
        """(invariant, what happened)"""
        self.restarted: list[tuple[str, float]] = []

    def note(self, time: float, who: str, what: str, about: object = "") -> None:
        """Add a line to the log."""
        self.log.append((time, who, what, about))

    def violated(self, invariant: str, what: str) -> None:
        """Take note of something that must not be."""
        self.violations.append((invariant, what))

    def lines(self, last: int) -> list[str]:
        """Return the end of the log."""
        return [f"{time:9.5f} {who:>9} {what} {_short(about)}" for time, who, what, about in self.log[-last:]]


def _short(about: object) -> str:
    text = str(about)
    return text if len(text) <= 300 else f"{text[:300]}…"
