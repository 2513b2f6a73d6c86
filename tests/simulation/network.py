"""The simulated network: random delays; control frames in order per pair, data pieces in any order."""

from __future__ import annotations

import random

from allreduced.protocol.peer import OperationFrame
from tests.simulation.agenda import Agenda
from tests.simulation.node import SimulatedNode


class Network:
    """Carries frames and data between the nodes that are alive."""

    def __init__(self, agenda: Agenda, rng: random.Random) -> None:
        self.nodes: dict[str, SimulatedNode] = {}
        self._agenda = agenda
        self._rng = rng
        self._last: dict[tuple[str, str], float] = {}
        self.frames: list[tuple[str, str, OperationFrame]] = []

    def control(self, source: str, target: str, frame: OperationFrame) -> None:
        """Deliver a control frame after those that were sent before it."""
        self.frames.append((source, target, frame))
        at = max(self._last.get((source, target), 0.0), self._agenda.now + self._delay())
        self._last[source, target] = at
        self._agenda.at(at, lambda: self._arrive(source, target, frame))

    def data(self, source: str, target: str, receive: int, offset: int, data: bytes, tag: int) -> None:
        """Deliver a piece of data at any time."""
        node = self.nodes[target]
        self._agenda.after(self._delay(), lambda: node.land(source, receive, offset, data, tag))

    def _arrive(self, source: str, target: str, frame: OperationFrame) -> None:
        if self.nodes[source].alive:
            self.nodes[target].take_frame(source, frame)

    def _delay(self) -> float:
        return self._rng.random() * (5e-3 if self._rng.random() < 0.1 else 5e-4)
