"""The errors of allreduced: one small tree, split by whose fault it is.

``ClusterError``: something died, left or came too late; the call may be right. ``UsageError``: the caller must
change something. ``AccessError``: a counterpart could not be believed. ``InternalError``: our bug.

Every error carries its facts as attributes and a ``hint`` that says what to do. Errors cross the socket as
``(code, message, hint, facts)``; :func:`to_wire` and :func:`from_wire` are inverse for every class of the tree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeAlias

Fact: TypeAlias = "str | int | float | bool | list[Fact] | dict[str, Fact] | None"
WireError: TypeAlias = "tuple[str, str, str, dict[str, Fact]]"

# Facts come from the other side of a socket: a text that int() refuses must not get that far.
_RANK = re.compile(r"-?[0-9]{1,10}", re.ASCII)


class AllReducedError(Exception):
    """Base of every error that allreduced raises on purpose.

    ``message`` says what happened with the facts in it, ``hint`` what to do about it (may be empty).
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def _facts(self) -> dict[str, Fact]:
        """Return the attributes of this error that travel with it, in plain types."""
        return {}

    @classmethod
    def _from_facts(cls, message: str, hint: str, facts: Mapping[str, Fact]) -> AllReducedError:
        """Build the error again from what :meth:`_facts` returned. Unknown facts are ignored."""
        del facts
        return cls(message, hint=hint)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (from_wire, (to_wire(self),))


class ClusterError(AllReducedError):
    """A part of the cluster died, left or came too late."""

    code = "cluster"


class AgentUnavailable(ClusterError):
    """This node's agent cannot be reached, went away, or could not be started."""

    code = "agent_unavailable"


class _RanksError(ClusterError):
    """An error whose facts are ranks and the nodes that held them."""

    def __init__(self, message: str, *, ranks: Sequence[int] = (), nodes: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.nodes: tuple[str, ...] = tuple(nodes)

    def _facts(self) -> dict[str, Fact]:
        return {"ranks": list(self.ranks), "nodes": list(self.nodes)}

    @classmethod
    def _from_facts(cls, message: str, hint: str, facts: Mapping[str, Fact]) -> AllReducedError:
        return cls(message, ranks=_ints(facts.get("ranks")), nodes=_strings(facts.get("nodes")), hint=hint)


class PeerLost(_RanksError):
    """The agents of ``nodes`` are gone, and with them ``ranks``."""

    code = "peer_lost"


class RankLost(_RanksError):
    """The processes of ``ranks`` ended or were killed while their agents (``nodes``) live."""

    code = "rank_lost"


class GroupChanged(_RanksError):
    """The group's members changed, so this operation cannot have the meaning that it was called with.

    ``diverged`` is true where this rank got a result that the others did not keep.
    """

    code = "group_changed"

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),
        nodes: Sequence[str] = (),
        diverged: bool = False,
        hint: str = "",
    ) -> None:
        super().__init__(message, ranks=ranks, nodes=nodes, hint=hint)
        self.diverged = diverged

    def _facts(self) -> dict[str, Fact]:
        return {**super()._facts(), "diverged": self.diverged}

    @classmethod
    def _from_facts(cls, message: str, hint: str, facts: Mapping[str, Fact]) -> AllReducedError:
        return cls(
            message,
            ranks=_ints(facts.get("ranks")),
            nodes=_strings(facts.get("nodes")),
            diverged=facts.get("diverged") is True,
            hint=hint,
        )


class DeadlineExceeded(ClusterError, TimeoutError):
    """The deadline passed; ``missing`` are the ranks that had not arrived (empty: all came, a peer was slow)."""

    code = "deadline_exceeded"

    def __init__(self, message: str, *, missing: Sequence[int] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.missing: tuple[int, ...] = tuple(missing)

    def _facts(self) -> dict[str, Fact]:
        return {"missing": list(self.missing)}

    @classmethod
    def _from_facts(cls, message: str, hint: str, facts: Mapping[str, Fact]) -> AllReducedError:
        return cls(message, missing=_ints(facts.get("missing")), hint=hint)


class WaitTimeout(ClusterError, TimeoutError):
    """``Work.wait(timeout=…)`` ended before the operation did; the operation goes on."""

    code = "wait_timeout"


class UsageError(AllReducedError):
    """The caller asked for something that cannot be done."""

    code = "usage"


class InvalidArgument(UsageError, ValueError):
    """An argument is outside what is supported; the message lists what there is."""

    code = "invalid_argument"


class RankClaimed(UsageError):
    """Another live process already holds ``rank`` of the group."""

    code = "rank_claimed"

    def __init__(self, message: str, *, rank: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.rank = rank

    def _facts(self) -> dict[str, Fact]:
        return {"rank": self.rank}

    @classmethod
    def _from_facts(cls, message: str, hint: str, facts: Mapping[str, Fact]) -> AllReducedError:
        rank = facts.get("rank")
        return cls(message, rank=rank if isinstance(rank, int) else -1, hint=hint)


class ClosedError(UsageError):
    """The communicator was closed by this process."""

    code = "closed"


class MismatchError(UsageError):
    """Ranks called the same operation differently: ``field`` differs, ``by_rank`` says who gave what."""

    code = "mismatch"

    def __init__(self, message: str, *, field: str, by_rank: Mapping[int, str], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.field = field
        self.by_rank: dict[int, str] = dict(by_rank)

    def _facts(self) -> dict[str, Fact]:
        return {"field": self.field, "by_rank": {str(rank): value for rank, value in self.by_rank.items()}}

    @classmethod
    def _from_facts(cls, message: str, hint: str, facts: Mapping[str, Fact]) -> AllReducedError:
        by_rank = facts.get("by_rank")
        pairs = by_rank.items() if isinstance(by_rank, dict) else ()
        return cls(
            message,
            field=str(facts.get("field", "")),
            by_rank={int(rank): str(value) for rank, value in pairs if _RANK.fullmatch(rank)},
            hint=hint,
        )


class LimitExceeded(UsageError):
    """A limit of the agent (``limit``, a settings key) stands in the way; others are not affected."""

    code = "limit_exceeded"

    def __init__(self, message: str, *, limit: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.limit = limit

    def _facts(self) -> dict[str, Fact]:
        return {"limit": self.limit}

    @classmethod
    def _from_facts(cls, message: str, hint: str, facts: Mapping[str, Fact]) -> AllReducedError:
        return cls(message, limit=str(facts.get("limit", "")), hint=hint)


class ConfigError(UsageError):
    """A setting is unknown or has a bad value; ``path`` is ``file: $.section.key`` or an environment variable."""

    code = "config"

    def __init__(self, message: str, *, path: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path

    def _facts(self) -> dict[str, Fact]:
        return {"path": self.path}

    @classmethod
    def _from_facts(cls, message: str, hint: str, facts: Mapping[str, Fact]) -> AllReducedError:
        return cls(message, path=str(facts.get("path", "")), hint=hint)


class AccessError(AllReducedError):
    """A counterpart could not be believed."""

    code = "access"


class AuthenticationError(AccessError):
    """A peer or client could not prove who it is, or may not attach."""

    code = "authentication"


class ProtocolError(AccessError):
    """The other side sent what the protocol does not allow."""

    code = "protocol"


class InternalError(AllReducedError):
    """A defect of allreduced itself; please report it with the message."""

    code = "internal"


def _tree(root: type[AllReducedError]) -> dict[str, type[AllReducedError]]:
    # A class without a code of its own shares its parent's, and the code means the parent.
    found = {root.code: root} if "code" in vars(root) else {}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def to_wire(error: AllReducedError) -> WireError:
    """Return the error as plain values, ready for any message format."""
    return (error.code, error.message, error.hint, error._facts())


def from_wire(wire: WireError) -> AllReducedError:
    """Return the error that :func:`to_wire` was given; an unknown code becomes ``AllReducedError``."""
    code, message, hint, facts = wire
    return _tree(AllReducedError).get(code, AllReducedError)._from_facts(message, hint, facts)


def _ints(value: Fact) -> tuple[int, ...]:
    return tuple(item for item in value if isinstance(item, int)) if isinstance(value, list) else ()


def _strings(value: Fact) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()
