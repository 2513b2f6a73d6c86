"""Tensors that callers may give, and results in the caller's kind.

NumPy arrays, torch tensors on the CPU (torch is never imported here, only used where the caller has), and everything
that has ``__array_interface__``, DLPack on the CPU or the buffer protocol.

NumPy has no bfloat16: inside the client such elements are ``uint16`` with the same bits, and only results are given in
the caller's type again, that of ml_dtypes or of torch.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from allreduced.client.dlpack import DLPack, read_dlpack
from allreduced.client.overlap import overlaps_itself, span
from allreduced.core.dtypes import DType, parse_dtype
from allreduced.core.errors import InvalidArgument

if TYPE_CHECKING:
    from typing_extensions import Buffer


class TorchTensor(Protocol):
    """The part of ``torch.Tensor`` that is used; names it without importing torch."""

    @property
    def requires_grad(self) -> bool:
        """Whether autograd records operations on it."""
        ...

    def is_floating_point(self) -> bool:
        """Return whether the elements are floats."""
        ...

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        ...


@runtime_checkable
class ArrayInterface(Protocol):
    """Anything with NumPy's array interface."""

    @property
    def __array_interface__(self) -> dict[str, object]:
        """Describe the memory."""
        ...


Array: TypeAlias = "npt.NDArray[np.generic]"
Foreign: TypeAlias = "ArrayInterface | DLPack | Buffer"
TorchT = TypeVar("TorchT", bound=TorchTensor)


@dataclass(frozen=True, slots=True)
class Kind:
    """What results for a caller's tensor are given as: tensors of torch, or arrays with elements of ``elements``.

    ``elements`` is None where they are those of ``DType.storage``.
    """

    torch: bool
    elements: np.dtype[np.generic] | None = None


class Tensor(NamedTuple):
    """A checked tensor: ``array``, with elements of ``dtype.storage``, shares the caller's memory."""

    array: Array
    dtype: DType
    kind: Kind

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, without gaps."""
        return self.array.size * self.dtype.itemsize


def read_tensor(value: object, *, what: str = "x") -> Tensor:
    """Return the tensor in ``value`` without copying it.

    :raises InvalidArgument: not a tensor on the CPU, a dtype outside the table, or not in this machine's byte order.
    """
    if type(value) is np.ndarray:
        known = _KNOWN.get(value.dtype)
        if known is not None:
            return Tensor(value, known, _NUMPY)
    elif _is_torch(value):
        return _from_torch(value, what)
    if type(value) is not np.ndarray and not isinstance(value, ArrayInterface) and isinstance(value, DLPack):
        array, dtype = read_dlpack(value, what)
        elements = _numpy_bfloat16(what) if dtype is DType.BFLOAT16 else None
        return Tensor(array, dtype, Kind(torch=False, elements=elements))
    array = _as_array(value, what)
    dtype = _read_dtype(array.dtype, what)
    if dtype is DType.BFLOAT16:
        return Tensor(array.view(dtype.storage), dtype, Kind(torch=False, elements=array.dtype))
    return Tensor(array, dtype, _NUMPY)


_NUMPY = Kind(torch=False)
_KNOWN = {np.dtype(dtype.label): dtype for dtype in DType if dtype is not DType.BFLOAT16}
"""Types that need no closer look. Those of another byte order differ from all of these."""


def _read_dtype(found: np.dtype[np.generic], what: str) -> DType:
    try:
        native = found.isnative and found == found.newbyteorder("=")
    except TypeError:  # types that are no plain memory, such as StringDType, know no byte order
        native = True
    if not native:
        raise InvalidArgument(
            f"{what} is not in this machine's byte order ({found.str})",
            hint="convert it first: x.astype(x.dtype.newbyteorder('='))",
        )
    return parse_dtype(found.name, what=what)


def read_out(value: object, like: Tensor, *, what: str = "out") -> Array:
    """Return the array behind ``out``, checked to take a result with the shape and dtype of ``like``.

    :raises InvalidArgument: another shape or dtype, read-only, or not a tensor.
    """
    out = read_tensor(value, what=what)
    if out.array.shape != like.array.shape:
        raise InvalidArgument(f"{what} has shape {out.array.shape}, the result has {like.array.shape}")
    if out.dtype is not like.dtype:
        raise InvalidArgument(f"{what} has dtype {out.dtype.label}, the result has {like.dtype.label}")
    # Before the flag is asked for: NumPy warns of it on broadcast arrays.
    if overlaps_itself(out.array):
        raise InvalidArgument(
            f"{what} has elements that share memory", hint="give one in which each has its own: np.empty_like(x)"
        )
    if not out.array.flags.writeable:
        raise InvalidArgument(f"{what} is read-only", hint="give a writable array, or leave it out to get a new one")
    return out.array


def in_kind(array: Array, dtype: DType, kind: Kind) -> object:
    """Return a result, with elements of ``dtype.storage``, in the caller's kind. It shares the memory of ``array``."""
    if not kind.torch:
        return array if kind.elements is None else array.view(kind.elements)
    module = sys.modules["torch"]
    if dtype is DType.BFLOAT16:
        return cast("object", module.from_numpy(array.view("int16")).view(module.bfloat16))
    return cast("object", module.from_numpy(array))


def _as_array(value: object, what: str) -> Array:
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidArgument(f"{what} is a masked array, and a mask cannot be reduced", hint="give x.filled(0)")
    try:
        if isinstance(value, ArrayInterface):
            # Of the caller's memory, never a copy. Subclasses of NumPy's array become plain ones; NumPy's scalars
            # come along here as arrays without dimensions.
            return np.asarray(value)
        view = memoryview(cast("bytes", value))
    except TypeError as error:
        raise InvalidArgument(
            f"{what} is a {type(value).__name__}, which is no tensor",
            hint="give a NumPy array, a torch tensor, or an object with the buffer protocol, such as np.asarray(x)",
        ) from error
    except ValueError as error:
        raise InvalidArgument(f"{what} cannot be read as an array: {error}") from error
    try:
        return np.asarray(view)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{what} cannot be read as an array: {error}") from error


def _numpy_bfloat16(what: str) -> np.dtype[np.generic]:
    try:
        found: np.dtype[np.generic] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ModuleNotFoundError:
        raise InvalidArgument(
            f"{what} is bfloat16, and NumPy has no such type for the result", hint="pip install ml_dtypes"
        ) from None
    return found


def _is_torch(value: object) -> bool:
    module = sys.modules.get("torch")
    tensor = getattr(module, "Tensor", None)
    return isinstance(tensor, type) and isinstance(value, tensor)


def _from_torch(value: object, what: str) -> Tensor:
    device = str(getattr(getattr(value, "device", None), "type", "cpu"))
    if device != "cpu":
        raise InvalidArgument(f"{what} is on device {device!r}", hint="move it to the CPU first: x.cpu()")
    dtype = parse_dtype(str(getattr(value, "dtype", "")).removeprefix("torch."), what=what)
    try:
        # Not for autograd, as in torch.distributed: neither what is read here nor what is written to an ``out``.
        tensor = value.detach()  # type: ignore[attr-defined]  # torch ships no stub we may import
        array: Array
        if dtype is DType.BFLOAT16:  # which .numpy() refuses
            array = tensor.view(sys.modules["torch"].int16).numpy().view(dtype.storage)
        else:
            array = tensor.numpy()
        room = tensor.untyped_storage().nbytes() - tensor.storage_offset() * array.itemsize
        if array.size and room < span(array)[1] - span(array)[0]:
            raise ValueError("its storage was freed, or is too small for it")
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{what} cannot be read as an array: {error}",
            hint="give a dense tensor with values of its own: x.to_dense(), x.resolve_conj()",
        ) from error
    return Tensor(array, dtype, Kind(torch=True))
