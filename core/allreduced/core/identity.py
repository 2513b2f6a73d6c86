"""Who and what things are: groups, members, operations, incarnations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeAlias

from allreduced.core.limits import MAX_RANKS, U32, AtMost, Id, Name, Ranks


class GroupKey(NamedTuple):
    """What users name a group by. Two jobs of one user, or of two users, never share a key."""

    uid: U32
    job: Name
    name: Name


class OperationKey(NamedTuple):
    """The ``use``-th operation called ``name`` in a formed group; ``name`` is empty for unnamed calls."""

    group: int
    name: str
    use: int

    def label(self) -> str:
        """Return how logs and errors call the operation."""
        return f"{self.name!r} (use {self.use})" if self.name else f"unnamed operation {self.use}"


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The authenticated other end of a link: its node name and the id of this start of its agent."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Member:
    """One node of a formed group: its agent's name and incarnation, and the ranks it holds, ascending."""

    node: Name
    incarnation: Id
    ranks: Ranks


Members: TypeAlias = Annotated[tuple[Member, ...], AtMost(MAX_RANKS)]
"""Those of a group, in the order of their lowest ranks, where they cross a wire."""
