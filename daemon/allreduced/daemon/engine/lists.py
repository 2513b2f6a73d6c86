"""Lists of several dtypes: each rank calls one operation for each dtype, and all of them at the first one.

The first operation has the name of the call and tells all shapes and dtypes, so lists that differ fail there, on every
rank. Those for further dtypes have names of their own, which only the ranks with such tensors call: when the first one
has failed so, nobody can end them any more, and they fail with it.
"""

from __future__ import annotations

import hashlib
from typing import Final

from allreduced.core.errors import AllReducedError, MismatchError
from allreduced.daemon.engine.events import Submitted
from allreduced.daemon.engine.group import FURTHER, Group
from allreduced.daemon.engine.operation import ENDED, Operation
from allreduced.daemon.engine.verdict import LastWords
from allreduced.protocol.peer import Fingerprint

_KIND: Final = "all_reduce_many"


class ListCall:
    """The last call of such a list by one rank. ``ended``: how its first operation had ended before this rank came."""

    __slots__ = ("_ended", "_fingerprint", "_name", "first")

    def __init__(self, submit: Submitted, first: Operation | None, ended: AllReducedError | None) -> None:
        self._name = submit.name
        self._fingerprint = submit.fingerprint
        self.first = first
        self._ended = ended

    @property
    def error(self) -> AllReducedError | None:
        """How the first operation failed, where the lists differ."""
        error = self._ended if self.first is None else self.first.error
        return error if isinstance(error, MismatchError) else None

    def has(self, submit: Submitted) -> bool:
        """Return whether this is an operation for a further dtype of the same call."""
        mine, given = self._fingerprint, submit.fingerprint
        if given.dtype <= mine.dtype or (given.kind, given.op, given.shape, given.algorithm) != (
            *(mine.kind, mine.op, mine.shape),
            mine.algorithm,
        ):
            return False
        further = FURTHER.search(submit.name)
        if further is None:
            return False
        name = submit.name[: further.start()]
        # A digest stands for a name that is too long.
        return name == self._name or name == hashlib.sha256(self._name.encode()).hexdigest()


class Lists:
    """Follows which operations belong to one list, and fails those that nobody can end."""

    def __init__(self, words: LastWords) -> None:
        self._words = words

    def refusal(self, group: Group, place: int, submit: Submitted) -> AllReducedError | None:
        """Return why the submit of a local rank is of no use: the list that it belongs to differs between ranks."""
        call = group.lists.get(place)
        return call.error if call is not None and _several(submit.fingerprint) and call.has(submit) else None

    def called(
        self,
        group: Group,
        place: int,
        submit: Submitted,
        operation: Operation | None,
        ended: AllReducedError | None = None,
    ) -> None:
        """Take note of a submit of a local rank. ``operation``: None where it has ``ended`` with this error already."""
        if not _several(submit.fingerprint):
            return
        call = group.lists.get(place)
        if call is None or not call.has(submit):
            group.lists[place] = ListCall(submit, operation, ended)
            return
        first = call.first
        if operation is None or first is None or first.state in ENDED or operation in first.parts:
            return
        first.parts = (*first.parts, operation)

    def failed(self, first: Operation) -> None:
        """Fail what belongs to a list whose first operation has failed because the lists differ."""
        parts, first.parts = first.parts, ()
        error = first.error
        for operation in parts:
            if operation.state not in ENDED and error is not None:
                self._words.fail(operation, error)


def _several(fingerprint: Fingerprint) -> bool:
    """Return whether a call is one of a list of several dtypes: only then shapes have their dtypes in front."""
    return fingerprint.kind == _KIND and fingerprint.shape[:1].isalpha()
