"""Reads tensors through DLPack, bfloat16 included, which ``numpy.from_dlpack`` does not know.

The layout of the structures and what a consumer owes are said in https://dmlc.github.io/dlpack/latest/. Nothing is
copied: the array refers to the producer's memory, and the producer is told when the last array over it is gone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from allreduced.core.dtypes import DType, parse_dtype
from allreduced.core.errors import InvalidArgument


@runtime_checkable
class DLPack(Protocol):
    """Anything that exports DLPack."""

    def __dlpack__(self, *, stream: None = None) -> object:
        """Return the capsule."""
        ...

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device."""
        ...


class _Tensor(ctypes.Structure):
    """``DLTensor``, with ``DLDevice`` and ``DLDataType`` written out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """``DLManagedTensor``, of producers before version 1."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_READ_ONLY = 1
_NAMES = {b"dltensor_versioned": b"used_dltensor_versioned", b"dltensor": b"used_dltensor"}
"""Names of capsules, and what whoever takes the tensor renames them to."""

_HOST = {1, 3, 11}
"""Memory of the CPU, and the pinned memory of CUDA and ROCm."""

_DEVICES = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 13: "cuda managed", 14: "oneapi"}
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_BOOL = 6
_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
"""From code 7 on. Not supported, but named in the error."""

_MAX_DIMENSIONS = 64

# The deleter is called with Python's lock held, as NumPy does: producers may free Python objects in it.
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.restype = ctypes.c_int
_set_name.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Owner:
    """Holds the producer's tensor; arrays over its memory refer to this object."""

    __slots__ = ("__array_interface__", "_address", "_deleter")

    def __init__(self, address: int, deleter: int | None, interface: dict[str, object]) -> None:
        self._address = address
        self._deleter = deleter
        self.__array_interface__ = interface

    def __del__(self) -> None:
        if self._deleter and not sys.is_finalizing():
            _Deleter(self._deleter)(self._address)


def read_dlpack(value: DLPack, what: str) -> tuple[npt.NDArray[np.generic], DType]:
    """Return an array with elements of ``dtype.storage`` over the tensor's memory, and its dtype.

    The array is read-only where the producer says so, or is so old that it cannot say.

    :raises InvalidArgument: it is not in the memory of the CPU, has a dtype outside the table, or its producer refuses.
    """
    try:
        device, _ = value.__dlpack_device__()
        device = int(device)
        if device not in _HOST:
            raise InvalidArgument(
                f"{what} is not in the memory of the CPU (DLPack device {device}, {_DEVICES.get(device, 'another')})",
                hint="copy it to the CPU first, such as by x.cpu(), jax.device_get(x) or cupy.asnumpy(x)",
            )
        capsule = _export(value)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(
            f"{what} cannot be read through DLPack: {error}", hint="give a dense tensor on one device, the CPU"
        ) from error
    return _take(capsule, what)


def _export(value: DLPack) -> object:
    export: Callable[..., object] = value.__dlpack__
    try:
        return export(max_version=(1, 0))
    except TypeError:  # a producer from before version 1, or a real complaint, which comes again
        return export()


def _take(capsule: object, what: str) -> tuple[npt.NDArray[np.generic], DType]:
    name = next((name for name in _NAMES if _is_valid(capsule, name)), None)
    if name is None:
        raise InvalidArgument(f"{what} gives something through DLPack that is no tensor, or was taken before")
    address: int = _get_pointer(capsule, name)
    read_only = True
    managed: _Managed | _Versioned
    if name == b"dltensor":
        managed = _Managed.from_address(address)
    else:
        managed = _Versioned.from_address(address)
        if managed.major != 1:
            raise InvalidArgument(f"{what} speaks version {managed.major}.{managed.minor} of DLPack; 1 is supported")
        read_only = bool(managed.flags & _READ_ONLY)
    tensor: _Tensor = managed.tensor
    dtype = _dtype(tensor, what)
    interface = _interface(tensor, dtype, read_only, what)
    # From here on the tensor is ours; before, an error leaves it to the capsule.
    _set_name(capsule, _NAMES[name])
    array: npt.NDArray[np.generic] = np.asarray(_Owner(address, managed.deleter, interface))
    return array, dtype


def _dtype(tensor: _Tensor, what: str) -> DType:
    if tensor.lanes != 1:
        raise InvalidArgument(f"{what} has elements that are vectors", hint="give their numbers one by one")
    if tensor.code == _BOOL and tensor.bits == 8:
        return DType.BOOL
    if 7 <= tensor.code < 7 + len(_FLOAT8):
        return parse_dtype(f"float8_{_FLOAT8[tensor.code - 7]}", what=what)
    kind = _KINDS.get(tensor.code, f"of code {tensor.code} in DLPack, of bits: ")
    return parse_dtype(f"{kind}{tensor.bits}", what=what)


def _interface(tensor: _Tensor, dtype: DType, read_only: bool, what: str) -> dict[str, object]:
    """Return the tensor as NumPy's array interface."""
    if tensor.device_type not in _HOST or not 0 <= tensor.ndim <= _MAX_DIMENSIONS:
        raise InvalidArgument(f"{what} gives through DLPack what is no tensor in the memory of the CPU")
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = tuple(stride * dtype.itemsize for stride in tensor.strides[: tensor.ndim]) if tensor.strides else None
    # NumPy takes no null pointer, and there may be one where there are no elements.
    data = ctypes.addressof(tensor) if 0 in shape else tensor.data
    if not data:
        raise InvalidArgument(f"{what} gives a tensor without memory through DLPack")
    return {
        "version": 3,
        "shape": shape,
        "typestr": np.dtype(dtype.storage).str,
        "strides": None if 0 in shape else strides,
        "data": (data + (0 if 0 in shape else tensor.byte_offset), read_only),
    }
