"""One start of a program: what is planned for it happens while it runs, later if it is stopped, never once it ended."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tests.simulation.agenda import Agenda

Callback = Callable[[], None]


class Process:
    """A process on virtual time. ``offset`` is added to the time of the agenda: every machine counts from elsewhere.

    While it is paused, what comes for it piles up: in order per source, in any order between sources.
    """

    def __init__(self, agenda: Agenda, offset: float = 0.0) -> None:
        self.agenda = agenda
        self.offset = offset
        self.alive = True
        self.paused = 0
        self._held: list[tuple[object, Callback]] = []

    def now(self) -> float:
        """Return this machine's monotonic time."""
        return self.agenda.now + self.offset

    def after(self, delay: float, source: object, callback: Callback) -> None:
        """Plan ``callback`` in ``delay`` seconds."""
        self.agenda.after(delay, partial(self.come, source, callback))

    def at(self, time: float, source: object, callback: Callback) -> None:
        """Plan ``callback`` at a time of this machine's clock."""
        self.agenda.at(time - self.offset, partial(self.come, source, callback))

    def come(self, source: object, callback: Callback) -> None:
        """Run ``callback`` now, or when the process goes on."""
        if not self.alive:
            return
        if self.paused:
            self._held.append((source, callback))
        else:
            callback()

    def pause(self) -> None:
        """Stop (SIGSTOP)."""
        self.paused += 1

    def resume(self, rng: random.Random) -> None:
        """Go on (SIGCONT) with what piled up."""
        if not self.paused:
            return
        self.paused -= 1
        if self.paused:
            return
        held, self._held = self._held, []
        if rng.random() < 0.5:
            by_source: dict[object, list[Callback]] = {}
            for source, callback in held:
                by_source.setdefault(source, []).append(callback)
            order = [source for source, _ in held]
            rng.shuffle(order)
            held = [(source, by_source[source].pop(0)) for source in order]
        for source, callback in held:
            self.come(source, callback)

    def kill(self) -> None:
        """End (SIGKILL)."""
        self.alive = False
        self._held.clear()


class Lane:
    """An ordered way: what goes in later never arrives earlier."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = 0.0

    def arrival(self, time: float) -> float:
        """Return when something that could arrive at ``time`` does arrive."""
        self.last = max(self.last, time)
        return self.last
