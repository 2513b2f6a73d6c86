"""Reductions and the table of element types that each is defined for; ``docs/numerics.md`` says what they compute."""

from __future__ import annotations

import enum
from functools import cache

from allreduced.core.dtypes import DType
from allreduced.core.errors import InvalidArgument


class Reduction(enum.IntEnum):
    """How values of the same element are combined. The number is its code on every wire and in the kernels.

    ``COPY`` takes the only source as it is (broadcast); users cannot ask for it.
    """

    COPY = 0
    SUM = 1
    MEAN = 2
    PROD = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8
    LAND = 9
    LOR = 10
    LXOR = 11

    __hash__ = int.__hash__  # as of DType

    @property
    def label(self) -> str:
        """The name users give as ``op=``."""
        return self.name.lower()

    @property
    def rounds(self) -> bool:
        """True where the combination of two floats is rounded; the others give one of them, or 0 or 1."""
        return self in (Reduction.SUM, Reduction.MEAN, Reduction.PROD)


_BY_LABEL = {reduction.label: reduction for reduction in Reduction if reduction is not Reduction.COPY}

_ARITHMETIC = frozenset({Reduction.SUM, Reduction.PROD})
_ORDER = frozenset({Reduction.MIN, Reduction.MAX})
_BITWISE = frozenset({Reduction.BAND, Reduction.BOR, Reduction.BXOR})
_LOGICAL = frozenset({Reduction.LAND, Reduction.LOR, Reduction.LXOR})


@cache
def reductions_of(dtype: DType) -> frozenset[Reduction]:
    """Return the reductions that are defined for ``dtype``. ``COPY`` is among them: it is defined for all."""
    copied = frozenset({Reduction.COPY})
    if dtype.is_complex:
        return copied | _ARITHMETIC | {Reduction.MEAN}
    if dtype.is_float:
        return copied | _ARITHMETIC | {Reduction.MEAN} | _ORDER | _LOGICAL
    return copied | _ARITHMETIC | _ORDER | _BITWISE | _LOGICAL


def parse_reduction(label: object, dtype: DType) -> Reduction:
    """Return the reduction named ``label`` if it is defined for ``dtype``.

    :raises InvalidArgument: the name is unknown, or the pair is outside the table; the message lists what there is.
    """
    reduction = _BY_LABEL.get(label) if isinstance(label, str) else None
    if reduction is None:
        raise InvalidArgument(f"reduction {label!r} is not supported; there are {', '.join(_BY_LABEL)}")
    defined = reductions_of(dtype)
    if reduction not in defined:
        listed = ", ".join(other.label for other in _BY_LABEL.values() if other in defined)
        reason, hint = _explain(reduction, dtype)
        raise InvalidArgument(
            f"{label} of {dtype.label} is not defined{reason}; for {dtype.label} there are {listed}", hint=hint
        )
    return reduction


def _explain(reduction: Reduction, dtype: DType) -> tuple[str, str]:
    """Return why a pair is not in the table, and what to do instead."""
    if reduction is Reduction.MEAN:
        kind = "an integer" if dtype.is_integer else "a bool"
        return f": the result would not be {kind}", "use op='sum' and divide, or convert to float64 first"
    if reduction in _BITWISE:
        return ": it is for integers and bool", "convert to an integer type first"
    if reduction in _ORDER:
        return ": complex numbers have no order", "reduce abs(x), or x.real and x.imag"
    return ": it is for real types and bool", "reduce x != 0"
