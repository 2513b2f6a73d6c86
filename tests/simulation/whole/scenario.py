"""One run as data: who is there, what they call, what goes wrong and when. It can be written down and run again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group: ``ranks[i]`` is the process (node, slot) that holds rank ``i``."""

    name: str
    ranks: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class OperationPlan:
    """One operation: what all ranks of a group call, ``at`` seconds after the group formed (each rank a bit later).

    ``absent``: ranks that never call it. ``odd``: a rank that calls it with another shape, -1 for none. ``priority``
    and ``deadline`` (seconds) are as in a call.
    """

    group: str
    name: str
    kind: str
    dtype: int
    op: int
    count: int
    root: int
    algorithm: str
    at: float
    deadline: float
    priority: int = 0
    absent: tuple[int, ...] = ()
    odd: int = -1

    def __str__(self) -> str:
        extra = f" absent={self.absent}" if self.absent else ""
        extra += f" odd={self.odd}" if self.odd >= 0 else ""
        what = f"{self.kind}({self.name!r}) {Reduction(self.op).value} {DType(self.dtype).label}[{self.count}]"
        return f"{self.group}: {what} at {self.at * 1e3:.2f} ms, deadline {self.deadline:g} s{extra}"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong, ``at`` seconds, or ``delay`` seconds after the ``count``-th ``frame`` was sent.

    ``frame`` is a type of frame (such as Prepare). ``node``, ``other`` and ``side`` say who is hit; ``@sender`` and
    ``@target`` are those of the frame. ``seconds``: until it is over (0: until the cluster is healed). Kinds:

    - ``crash``: the agent's process is killed, and started anew after ``seconds``
    - ``power``: the same for the whole machine, which falls silent
    - ``pause``: the agent is stopped (SIGSTOP)
    - ``drain``: the agent stops in order, and is started anew
    - ``cut``: the connection between ``node`` and ``other`` is reset
    - ``part``: nothing passes between ``side`` and the others, or only ``other``
    - ``oneway``: nothing passes from ``side`` to the others, or only to ``other``
    - ``slow``: what ``node`` sends takes up to a quarter of the failure timeout
    - ``kill``: the client process ``slot`` of ``node`` is killed, and started anew
    - ``hang``: the client process is stopped
    - ``leave``: the client process leaves its groups
    - ``memory``: no arena can be made on ``node``
    """

    kind: str
    at: float = 0.0
    frame: str = ""
    count: int = 0
    delay: float = 0.0
    node: str = ""
    other: str = ""
    side: tuple[str, ...] = ()
    slot: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        when = f"{self.delay * 1e3:.2f} ms after {self.frame} {self.count}" if self.frame else f"at {self.at:.4f}"
        whom = [self.node, self.other, "+".join(self.side)]
        slot = f" process {self.slot}" if self.kind in ("kill", "hang", "leave") else ""
        lasts = f" for {self.seconds:.4f} s" if self.seconds else ""
        return f"{self.kind} {' '.join(one for one in whom if one)}{slot} {when}{lasts}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limits of every agent, bytes; small ones let operations wait for each other."""

    tile: int = 64
    inline: int = 0
    arena: int = 4 << 20
    scratch: int = 1 << 20
    chunk: int = 4096
    window: int = 2


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run. ``processes``: how many client processes each node has. ``seed`` decides about every delay.

    ``blind``: pairs (a, b) of nodes where ``a`` does not know where ``b`` listens. ``reforms``: how often a process
    forms its groups anew. ``echoes``: after a link was reset, frames of the old one come once more over the new one.
    ``heal_at``: when all faults are over.
    """

    seed: int
    timeout: float
    processes: dict[str, int]
    groups: tuple[GroupPlan, ...]
    operations: tuple[OperationPlan, ...]
    faults: tuple[Fault, ...]
    sizes: Sizes = field(default_factory=Sizes)
    blind: tuple[tuple[str, str], ...] = ()
    reforms: int = 0
    echoes: bool = False
    heal_at: float = 0.0

    def describe(self) -> str:
        """Return the run in a few lines."""
        lines = [f"seed {self.seed}, failure_timeout {self.timeout} s, healed at {self.heal_at:.4f} s, {self.sizes}"]
        places = [", ".join(f"{node}.{slot}" for node, slot in group.ranks) for group in self.groups]
        lines += [f"  group {group.name}: {held}" for group, held in zip(self.groups, places, strict=True)]
        lines += [f"  {operation}" for operation in self.operations]
        lines += [f"  fault: {fault}" for fault in self.faults]
        return "\n".join(lines)

    def but(self, **changes: object) -> Scenario:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def save(scenario: Scenario, path: Path) -> None:
    """Write a run down."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(scenario), indent=1))


def load(path: Path) -> Scenario:
    """Read what :func:`save` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Scenario)
