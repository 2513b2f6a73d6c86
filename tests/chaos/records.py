"""What ranks say of themselves: lines of JSON, as values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Failure:
    """An error that a rank got: its code and its facts. ``t``: when, in seconds of the monotonic clock."""

    code: str
    message: str
    t: float = 0.0
    ranks: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()
    missing: frozenset[int] = frozenset()
    diverged: bool = False

    def __str__(self) -> str:
        facts = {"ranks": sorted(self.ranks), "nodes": sorted(self.nodes), "missing": sorted(self.missing)}
        told = "".join(f" {name}={fact}" for name, fact in facts.items() if fact)
        return f"{self.code}{told}{' diverged' if self.diverged else ''}: {self.message}"


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

    def __str__(self) -> str:
        by_error: dict[str, list[str]] = {}
        for name, error in self.errors.items():
            by_error.setdefault(str(error), []).append(name)
        parts = [f"{self.t:.3f} {self.event}", f"{self.step}" if self.step >= 0 else ""]
        parts += [f"got {', '.join(sorted(self.got))}" if self.got else ""]
        parts += [f"WRONG {name}: {what}" for name, what in self.wrong.items()]
        parts += [f"failed {', '.join(names)} with {error}" for error, names in by_error.items()]
        parts += [f"a last call: {self.error}" if self.error else ""]
        return "; ".join(filter(None, parts))


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
        t=float(str(said["t"])),
        ranks=numbers("ranks"),
        nodes=frozenset(map(str, nodes)) if isinstance(nodes, list) else frozenset(),
        missing=numbers("missing"),
        diverged=said.get("diverged") is True,
    )
