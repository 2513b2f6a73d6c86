"""Whether a submit makes sense, decided from the message and the group alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from allreduced.core.dtypes import DType
from allreduced.core.errors import InvalidArgument
from allreduced.core.reductions import Reduction, parse_reduction
from allreduced.protocol.local import Submit
from allreduced.protocol.peer import Fingerprint

MAX_TENSOR = 1 << 50
"""Bytes of one operation at most: far above any memory, and far from where 64-bit sums of offsets wrap."""

_DTYPES = {int(dtype): dtype for dtype in DType}
_REDUCTIONS = {int(reduction): reduction for reduction in Reduction}
_REDUCING = ("all_reduce", "all_reduce_many")
KINDS = (*_REDUCING, "broadcast", "barrier")
"""The kinds of operations that there are."""


@dataclass(slots=True)
class HeldGroup:
    """A formed group, as one client holds it. ``default_deadline``: seconds, for operations that name none.

    ``calls`` counts what the client submitted, ``last`` is kind and name of the last one.
    """

    group: int
    rank: int
    size: int
    default_deadline: float
    calls: int = 0
    last: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class Submission:
    """A submit that makes sense. ``nbytes``: of the input that this rank gives, 0 where it gives none."""

    fingerprint: Fingerprint
    nbytes: int


def check_submit(message: Submit, held: HeldGroup, inline_limit: int) -> Submission:
    """Return what the message asks for.

    Whether its arena is the client's own and large enough is not looked at here.

    :raises InvalidArgument: kind, dtype, reduction, count, root or input do not fit together; the message says what
        there is.
    """
    submission = _resolve(
        message.kind,
        message.dtype,
        message.op,
        message.shape,
        message.count,
        message.root,
        message.algorithm,
        held.size,
    )
    if message.root != held.rank and message.root >= 0:
        submission = Submission(submission.fingerprint, 0)
    payload = message.payload
    if payload is None or not len(payload) == submission.nbytes <= inline_limit or message.arena >= 0 or message.upload:
        _check_input(message, submission.nbytes, inline_limit)
    return submission


@lru_cache(maxsize=1024)
def _resolve(
    kind: str, dtype_code: int, op: int, shape: str, count: int, root: int, algorithm: str, size: int
) -> Submission:
    """Return what a call means at the rank that gives its input. Training makes the same calls again and again."""
    dtype = _DTYPES.get(dtype_code)
    if dtype is None:
        raise InvalidArgument(f"dtype {dtype_code} is not known; there are {_listed(_DTYPES)}")
    reduction = _REDUCTIONS.get(op)
    if reduction is None:
        raise InvalidArgument(f"reduction {op} is not known; there are {_listed(_REDUCTIONS)}")
    if kind not in KINDS:
        raise InvalidArgument(f"operation {kind!r} is not known; there are {', '.join(KINDS)}")
    nbytes = count * dtype.itemsize
    if nbytes > MAX_TENSOR:
        raise InvalidArgument(f"{count} elements of {dtype.label} are more than any agent can reduce")
    if kind in _REDUCING:
        if reduction is Reduction.MEAN or reduction is Reduction.COPY:
            parse_reduction(reduction.label, dtype)
    elif kind == "barrier":
        if count:
            raise InvalidArgument(f"a barrier has no elements, not {count}")
    elif reduction is not Reduction.COPY:
        raise InvalidArgument(f"a broadcast does not reduce; op {reduction.label} cannot be given")
    if kind == "broadcast":
        if not 0 <= root < size:
            raise InvalidArgument(f"root {root} is outside the group, which has ranks 0 to {size - 1}")
    elif root != -1:
        raise InvalidArgument(f"operation {kind} has no root, not {root}")
    return Submission(Fingerprint(kind, dtype_code, op, shape, count, root, algorithm), nbytes)


def fingerprint_of(message: Submit) -> Fingerprint:
    """Return what must agree between ranks, also where it makes no sense."""
    return Fingerprint(
        message.kind, message.dtype, message.op, message.shape, message.count, message.root, message.algorithm
    )


def _check_input(message: Submit, nbytes: int, inline_limit: int) -> None:
    payload = message.payload
    ways = (payload is not None) + (message.arena >= 0) + message.upload
    if ways > 1:
        raise InvalidArgument("an input comes in the message, in an arena or in pieces, not in several ways at once")
    if nbytes and not ways:
        raise InvalidArgument(f"{nbytes} bytes of input are missing")
    if payload is None:
        return
    if len(payload) != nbytes:
        raise InvalidArgument(f"the input has {len(payload)} bytes, {nbytes} were expected")
    if nbytes > inline_limit:
        raise InvalidArgument(f"an input of {nbytes} bytes is over the inline limit of {inline_limit}; use an arena")


def _listed(table: dict[int, DType] | dict[int, Reduction]) -> str:
    return ", ".join(f"{code} ({value.label})" for code, value in table.items())
