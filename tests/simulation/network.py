"""The simulated network: random delays; control frames in order per pair, data pieces in any order."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.simulation.agenda import Agenda
from tests.simulation.node import SimulatedNode

from allreduced.protocol.peer import EngineFrame


class Network:
    """Carries frames and data between the nodes that are alive."""

    def __init__(self, agenda: Agenda, rng: random.Random) -> None:
        self.nodes: dict[str, SimulatedNode] = {}
        self._agenda = agenda
        self._rng = rng
        self._last: dict[tuple[str, str], float] = {}
        self._epoch = 0
        self.frames: list[tuple[str, str, EngineFrame]] = []

    def reset(self) -> None:
        """Lose all that is on its way, on all links."""
        self._epoch += 1

    def control(self, source: str, target: str, frame: EngineFrame) -> None:
        """Deliver a control frame after those that were sent before it."""
        self.frames.append((source, target, frame))
        self.message(source, target, lambda node: node.take_frame(source, frame))

    def message(self, source: str, target: str, deliver: Callable[[SimulatedNode], None]) -> None:
        """Do something at the target, in order with the control frames."""
        at = max(self._last.get((source, target), 0.0), self._agenda.now + self._delay())
        self._last[source, target] = at

        epoch = self._epoch

        def arrive() -> None:
            if self.nodes[source].alive and epoch == self._epoch and target in self.nodes:
                deliver(self.nodes[target])

        self._agenda.at(at, arrive)

    def data(self, source: str, target: str, receive: int, offset: int, data: bytes, tag: int) -> None:
        """Deliver a piece of data at any time."""
        node, epoch = self.nodes[target], self._epoch

        def arrive() -> None:
            if epoch == self._epoch:
                node.land(source, receive, offset, data, tag)

        self._agenda.after(self._delay(), arrive)

    def _delay(self) -> float:
        return self._rng.random() * (5e-3 if self._rng.random() < 0.1 else 5e-4)
