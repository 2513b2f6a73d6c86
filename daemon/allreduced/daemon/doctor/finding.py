"""What the doctor says: one finding about one thing."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from allreduced.core.errors import AllReducedError


class Level(enum.Enum):
    """How bad a finding is, from good to bad."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing need be done."""
    WARNING = "warning"
    """It works, but not as well as it could, or not for long."""
    PROBLEM = "problem"
    """Jobs fail, or some nodes cannot take part."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact. ``subject``: a word for what it is about; ``mend``: the command, or the setting, that mends it."""

    subject: str
    level: Level
    message: str
    mend: str = ""


def ok(subject: str, message: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(subject, Level.OK, message)


def note(subject: str, message: str, mend: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(subject, Level.NOTE, message, mend)


def warning(subject: str, message: str, mend: str) -> Finding:
    """Return a finding that something should be better."""
    return Finding(subject, Level.WARNING, message, mend)


def problem(subject: str, message: str, mend: str) -> Finding:
    """Return a finding that something is broken."""
    return Finding(subject, Level.PROBLEM, message, mend)


def refused(subject: str, error: AllReducedError) -> Finding:
    """Return the problem that an error tells of."""
    return Finding(subject, Level.PROBLEM, error.message, error.hint)


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level; OK where there are no findings."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)
