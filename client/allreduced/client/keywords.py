"""The keywords that many collectives share, as type checkers see them. What they mean: see the communicators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from allreduced.client.arrays import Array


class Keywords(TypedDict, total=False):
    """Those of every collective."""

    name: str | None
    deadline: float | None
    priority: int


class MoveKeywords(Keywords, total=False):
    """Those of the collectives that move a tensor."""

    algorithm: str | None


class MoveToArray(MoveKeywords, total=False):
    """The same where the result is an array of NumPy."""

    out: Array | None
    view: bool


class ReduceKeywords(MoveKeywords, total=False):
    """Those of the collectives that combine tensors."""

    op: str
    deterministic: bool


class ReduceToArray(ReduceKeywords, total=False):
    """The same where the result is an array of NumPy."""

    out: Array | None
    view: bool


class ReduceToArrays(ReduceKeywords, total=False):
    """The same where it is a list of them."""

    out: Sequence[Array] | None
    view: bool
