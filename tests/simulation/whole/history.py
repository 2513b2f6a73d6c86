"""What happened in a run: a log for people, and the facts that the invariants are about."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.simulation.whole.process import Process

from allreduced.core.errors import AllReducedError
from allreduced.core.identity import Member
from allreduced.daemon.engine.events import GroupStarted
from allreduced.protocol.change import Change


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

    ``installed``: by generation that ended, the change and when. ``delivered`` and ``failed``: by operation (name,
    use), the generation in which it ended here and when. ``departed``: members that it was told to count no more.
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
    failed: dict[tuple[str, int], tuple[int, AllReducedError, float]] = field(default_factory=dict)
    departed: set[str] = field(default_factory=set)
    ended: bool = False
    """A change ended the group."""
    error: AllReducedError | None = None
    cut_off: float | None = None
    """When it was told that the group is over for it alone, or learned of a change without it."""
    learned: tuple[Change, float] | None = None
    """A change that does not include it."""
    gone_at: float | None = None
    """When it ended: all its clients left the group, or its agent said goodbye or was killed."""

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
        self.lost: dict[int, dict[int, float]] = {}
        """By group: ranks whose process, or whose agent, ended or left, and when."""
        self.about = 0
        """The group that the first of them is about."""

    def lose(self, group: int, ranks: Iterable[int], time: float) -> None:
        """Take note of ranks that are lost to a group."""
        lost = self.lost.setdefault(group, {})
        for rank in ranks:
            lost.setdefault(rank, time)

    def note(self, time: float, who: str, what: str, about: object = "") -> None:
        """Add a line to the log."""
        self.log.append((time, who, what, about))

    def violated(self, invariant: str, what: str, group: int = 0) -> None:
        """Take note of something that must not be, in a formed group where that is known."""
        if not self.violations:
            self.about = group
            self.note(0.0 if not self.log else self.log[-1][0], "violated", f"{invariant}: {what}", group)
        self.violations.append((invariant, what))

    def lines(self, last: int) -> list[str]:
        """Return the end of the log, of what has to do with the first violation if that is about one group."""
        group = str(self.about) if self.about else ""
        told = [
            f"{time:9.5f} {who:>9} {what} {_short(about)}"
            for time, who, what, about in self.log
            if not group or who == "fault" or what == "liveness" or group in f"{about}{what}"
        ]
        return [line.replace(group, "GROUP") if group else line for line in told[len(told) - last :]]


def _short(about: object) -> str:
    text = re.sub(r"fingerprint=Fingerprint\(kind='(\w*)'[^)]*\)'?[^)]*\)", r"\1", str(about))
    text = re.sub(r"Grant\(receive=(\d+)[^)]*\)", r"\1", text)
    text = re.sub(r"Member\(node='(\w+)', incarnation=(\d+), ranks=(\([^)]*\))\)", r"\1/\2\3", text)
    return text if len(text) <= 300 else f"{text[:300]}…"
