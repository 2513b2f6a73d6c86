"""What ranks say of themselves: lines of JSON, as values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Failure:
    """An error that a rank got: its code and its facts."""

    code: str
    message: str
    ranks: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()
    missing: frozenset[int] = frozenset()
    diverged: bool = False


@dataclass(frozen=True)
class Record:
    """One line of one rank; see ``rank.py``. ``t``: seconds of the monotonic clock."""

    rank: int
    event: str
    t: float
    job: str = ""
    step: int = -1
    got: frozenset[str] = frozenset()
    wrong: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, Failure] = field(default_factory=dict)
    error: Failure | None = None


def parse(rank: int, line: bytes) -> Record:
    """Return what a rank wrote."""
    said = json.loads(line)
    return Record(
        rank=rank,
        event=said["event"],
        t=said["t"],
        job=said.get("job", ""),
        step=said.get("step", -1),
        got=frozenset(said.get("got", ())),
        wrong=said.get("wrong", {}),
        errors={name: _failure(error) for name, error in said.get("errors", {}).items()},
        error=_failure(said["error"]) if said.get("error") else None,
    )


def _failure(said: dict[str, object]) -> Failure:
    def numbers(key: str) -> frozenset[int]:
        values = said.get(key)
        return frozenset(int(value) for value in values) if isinstance(values, list) else frozenset()

    nodes = said.get("nodes")
    return Failure(
        code=str(said["code"]),
        message=str(said["message"]),
        ranks=numbers("ranks"),
        nodes=frozenset(map(str, nodes)) if isinstance(nodes, list) else frozenset(),
        missing=numbers("missing"),
        diverged=said.get("diverged") is True,
    )
