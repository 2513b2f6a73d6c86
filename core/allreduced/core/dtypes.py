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
    INT8 = 5
    INT16 = 6
    UINT8 = 7
    UINT16 = 8
    UINT32 = 9
    UINT64 = 10
    BOOL = 11
    FLOAT16 = 12
    BFLOAT16 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15

    __hash__ = int.__hash__  # that of enumerations is a Python function, and tables of dtypes are read in every call

    @property
    def label(self) -> str:
        """The name users give and read, such as ``float32``: NumPy's, and ``bfloat16``."""
        return self.name.lower()

    @property
    def storage(self) -> str:
        """The NumPy name of a type whose elements hold the same bits: ``uint16`` for bfloat16, else the label.

        NumPy knows ``bfloat16`` only while ml_dtypes is imported; this name is known always.
        """
        return "uint16" if self is DType.BFLOAT16 else self.label

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def accumulator(self) -> DType:
        """The type of partial results until the last rounding: float32 for 16-bit floats, else itself."""
        return DType.FLOAT32 if self in (DType.FLOAT16, DType.BFLOAT16) else self

    @property
    def is_integer(self) -> bool:
        """True for types whose sums wrap and whose mean is refused. ``bool`` is no integer."""
        return self in _INTEGERS

    @property
    def is_float(self) -> bool:
        """True for real floating-point types."""
        return self in _FLOATS

    @property
    def is_complex(self) -> bool:
        """True for types whose elements are pairs of floats."""
        return self in _COMPLEX


_FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64})
_COMPLEX = frozenset({DType.COMPLEX64, DType.COMPLEX128})
_INTEGERS = frozenset(DType) - _FLOATS - _COMPLEX - {DType.BOOL}
_ITEMSIZE = {
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.INT32: 4,
    DType.INT64: 8,
    DType.INT8: 1,
    DType.INT16: 2,
    DType.UINT8: 1,
    DType.UINT16: 2,
    DType.UINT32: 4,
    DType.UINT64: 8,
    DType.BOOL: 1,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.COMPLEX64: 8,
    DType.COMPLEX128: 16,
}
_BY_LABEL = {dtype.label: dtype for dtype in DType}


def parse_dtype(label: str, *, what: str = "") -> DType:
    """Return the element type named ``label``; ``what`` names the tensor in the error.

    :raises InvalidArgument: the name is not in the table; the message lists the table.
    """
    try:
        return _BY_LABEL[label]
    except KeyError:
        subject = f"{what}: dtype" if what else "dtype"
        raise InvalidArgument(
            f"{subject} {label!r} is not supported; there are {', '.join(_BY_LABEL)}",
            hint="convert the tensor first, for example x.astype('float32')",
        ) from None
