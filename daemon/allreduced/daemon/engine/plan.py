"""What a fingerprint means in a group: checked and resolved once, then looked up."""

from __future__ import annotations

from allreduced.core.dtypes import DType
from allreduced.core.errors import AllReducedError, InvalidArgument
from allreduced.core.reductions import Reduction, parse_reduction
from allreduced.daemon.engine import wording
from allreduced.daemon.engine.group import Group
from allreduced.protocol.peer import Fingerprint
from allreduced.schedules.select import select

_DTYPES = {int(dtype) for dtype in DType}
_REDUCTIONS = {int(reduction) for reduction in Reduction}
_MAX_COUNT = 1 << 58
_MAX_PLANS = 4096


class Plan:
    """A fingerprint, resolved. Where ``error`` is set the call cannot be served and nothing else counts."""

    __slots__ = ("algorithm", "broadcast", "dtype", "error", "nbytes", "partial", "reduction", "root_member")

    def __init__(self, group: Group, fingerprint: Fingerprint) -> None:
        self.algorithm = ""
        self.broadcast = fingerprint.kind == "broadcast"
        self.dtype = DType.FLOAT32
        self.partial = DType.FLOAT32
        """The type of values that are not final, where they are reduced at several hops."""
        self.reduction = Reduction.COPY
        self.root_member = -1
        self.nbytes = 0
        """Bytes of the tensor; 0 for operations without data."""
        self.error: AllReducedError | None = None
        try:
            self._resolve(group, fingerprint)
        except AllReducedError as error:
            self.error = error

    def _resolve(self, group: Group, fingerprint: Fingerprint) -> None:
        count = fingerprint.count
        if not 0 <= count <= _MAX_COUNT:
            raise InvalidArgument(f"{count} elements are not supported")
        data = fingerprint.kind != "barrier"
        if data and fingerprint.dtype not in _DTYPES:
            raise InvalidArgument(f"unknown code {fingerprint.dtype} of an element type")
        if data and count:
            self.dtype = DType(fingerprint.dtype)
            self.nbytes = count * self.dtype.itemsize
        if self.broadcast:
            for index, member in enumerate(group.members):
                if fingerprint.root in member.ranks:
                    self.root_member = index
            if self.root_member < 0:
                ranks = sorted(rank for member in group.members for rank in member.ranks)
                raise InvalidArgument(
                    f"{group.label} has no rank {fingerprint.root} that could be the root",
                    hint=f"there are {wording.ranks_text(ranks)}",
                )
        elif data:
            if fingerprint.op not in _REDUCTIONS:
                raise InvalidArgument(f"unknown code {fingerprint.op} of a reduction")
            self.reduction = parse_reduction(Reduction(fingerprint.op).label, DType(fingerprint.dtype))
        self.partial = self.dtype.accumulator if self.reduction.rounds else self.dtype
        narrow = self.partial is not self.dtype
        self.algorithm = select(fingerprint.kind, fingerprint.algorithm, len(group.members), self.nbytes, narrow=narrow)


def plan_for(group: Group, fingerprint: Fingerprint) -> Plan:
    """Return the plan of a fingerprint; those of a group are kept, for training calls the same again and again."""
    plan = group.plans.get(fingerprint)
    if plan is None:
        if len(group.plans) >= _MAX_PLANS:
            group.plans.clear()
        plan = group.plans[fingerprint] = Plan(group, fingerprint)
    return plan
