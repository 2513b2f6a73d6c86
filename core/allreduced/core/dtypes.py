"""Element types that tensors may have, by the names users know."""

from __future__ import annotations

import enum

from allreduced.core.errors import InvalidArgument


class DType(enum.IntEnum):
    """An element type. The number is its code on every wire and in the kernels and never changes."""

    FLOAT32 = 1
    FLOAT64 = 2
    INT32 = 3
    INT64 = 4

    @property
    def label(self) -> str:
        """The NumPy name, such as ``float32``."""
        return self.name.lower()

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_integer(self) -> bool:
        """True for types whose sums wrap and whose mean is refused."""
        return self in (DType.INT32, DType.INT64)


_ITEMSIZE = {DType.FLOAT32: 4, DType.FLOAT64: 8, DType.INT32: 4, DType.INT64: 8}
_BY_LABEL = {dtype.label: dtype for dtype in DType}


def parse_dtype(label: str) -> DType:
    """Return the element type named ``label``.

    :raises InvalidArgument: the name is not in the table; the message lists the table.
    """
    try:
        return _BY_LABEL[label]
    except KeyError:
        raise InvalidArgument(
            f"dtype {label!r} is not supported; there are {', '.join(_BY_LABEL)}",
            hint="convert the tensor first, for example x.astype('float32')",
        ) from None
