"""Reductions and the table of element types that each is defined for."""

from __future__ import annotations

import enum

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

    @property
    def label(self) -> str:
        """The name users give as ``op=``."""
        return self.name.lower()


_BY_LABEL = {reduction.label: reduction for reduction in Reduction if reduction is not Reduction.COPY}


def parse_reduction(label: object, dtype: DType) -> Reduction:
    """Return the reduction named ``label`` if it is defined for ``dtype``.

    :raises InvalidArgument: the name is unknown, or the pair is outside the table; the message lists what there is.
    """
    reduction = _BY_LABEL.get(label) if isinstance(label, str) else None
    if reduction is None:
        raise InvalidArgument(f"reduction {label!r} is not supported; there are {', '.join(_BY_LABEL)}")
    if reduction is Reduction.MEAN and dtype.is_integer:
        raise InvalidArgument(
            f"mean of {dtype.label} is not defined: the result would not be an integer",
            hint="use op='sum' and divide, or convert to float64 first",
        )
    return reduction
