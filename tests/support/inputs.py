"""What callers may give as a tensor, each with the values in it."""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


class Interface:
    """Has NumPy's array interface and nothing else."""

    def __init__(self, of: Array, **changes: object) -> None:
        self.of = of
        self.changes = changes

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {**self.of.__array_interface__, **self.changes}


def export(of: Array, **options: object) -> object:
    """Return a capsule, for types that NumPy's stubs leave out too."""
    method: Callable[..., object] = of.__dlpack__  # type: ignore[misc]  # typed for numbers, bool works as well
    return method(**options)


class Exporter:
    """Exports a NumPy array through DLPack, as a producer of version 1 does, or as an older one."""

    def __init__(self, of: Array, *, device: int = 1, old: bool = False) -> None:
        self.of = of
        self.device = device
        self.old = old

    def __dlpack__(self, *, stream: None = None, **options: object) -> object:
        if self.old and options:
            raise TypeError("unexpected keyword argument")
        return export(self.of, stream=stream, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


def _mapped(data: bytes) -> mmap.mmap:
    mapped = mmap.mmap(-1, len(data))
    mapped[:] = data
    return mapped


def _read_only(of: Array) -> Array:
    of.flags.writeable = False
    return of


GRID = np.arange(12, dtype=np.float32).reshape(3, 4)

INPUTS: Mapping[str, tuple[Callable[[], object], Array]] = {
    "numpy": (lambda: GRID.copy(), GRID),
    "zero-dimensional": (lambda: np.array(7, np.int16), np.array(7, np.int16)),
    "NumPy scalar": (lambda: np.float64(2.5), np.array(2.5)),
    "empty": (lambda: np.zeros((0, 3), np.int64), np.zeros((0, 3), np.int64)),
    "Fortran order": (lambda: np.asfortranarray(GRID), GRID),
    "transposed": (lambda: GRID.copy().T, GRID.T),
    "strided": (lambda: np.repeat(GRID, 3, axis=1)[:, ::3], GRID),
    "negative strides": (lambda: GRID[::-1, ::-1].copy()[::-1, ::-1], GRID),
    "broadcast": (lambda: np.broadcast_to(GRID[1], (3, 4)), np.stack([GRID[1]] * 3)),
    "broadcast_arrays": (lambda: np.broadcast_arrays(GRID[1], GRID)[0], np.stack([GRID[1]] * 3)),
    "read-only": (lambda: _read_only(GRID.copy()), GRID),
    "not aligned": (
        lambda: np.frombuffer(b"x" + GRID.tobytes(), np.uint8)[1:].view(np.float32).reshape(3, 4),
        GRID,
    ),
    "matrix": (lambda: np.asarray(GRID).view(np.matrix), GRID),
    "bfloat16": (lambda: GRID.astype(ml_dtypes.bfloat16), GRID.astype(ml_dtypes.bfloat16)),
    "long long": (lambda: np.arange(3, dtype="longlong"), np.arange(3)),
    "bytes": (lambda: b"abc", np.array([97, 98, 99], np.uint8)),
    "bytearray": (lambda: bytearray(b"abc"), np.array([97, 98, 99], np.uint8)),
    "array.array": (lambda: array.array("d", [1, 2]), np.array([1.0, 2.0])),
    "array.array of h": (lambda: array.array("h", [-1, 2]), np.array([-1, 2], np.int16)),
    "memoryview": (lambda: GRID.copy().data, GRID),
    "memoryview, every other": (lambda: memoryview(array.array("i", range(6)))[::2], np.array([0, 2, 4], np.int32)),
    "memoryview of bool": (lambda: memoryview(b"\0\1").cast("?"), np.array([False, True])),
    "memoryview of half": (lambda: np.ones(2, np.float16).data, np.ones(2, np.float16)),
    "memoryview of complex": (lambda: np.full(2, 1 - 2j).data, np.full(2, 1 - 2j)),
    "memoryview, two dimensions": (
        lambda: memoryview(bytes(range(6))).cast("B", (2, 3)),
        np.arange(6, dtype="u1").reshape(2, 3),
    ),
    "ctypes": (lambda: (ctypes.c_float * 4 * 3).from_buffer_copy(GRID.data), GRID),
    "mmap": (lambda: _mapped(b"\1\2\3"), np.array([1, 2, 3], np.uint8)),
    "array interface": (lambda: Interface(GRID.copy().T), GRID.T),
    "array interface, read-only": (lambda: Interface(_read_only(GRID.copy())), GRID),
    "DLPack": (lambda: Exporter(GRID.copy()), GRID),
    "DLPack, pinned memory": (lambda: Exporter(GRID.copy(), device=3), GRID),
    "DLPack, read-only": (lambda: Exporter(_read_only(GRID.copy())), GRID),
    "DLPack, old": (lambda: Exporter(GRID.copy(), old=True), GRID),
    "DLPack, strided": (lambda: Exporter(np.repeat(GRID, 3, axis=1)[::-1, ::3]), GRID[::-1]),
    "DLPack, zero-dimensional": (lambda: Exporter(np.array(3, np.uint64)), np.array(3, np.uint64)),
    "DLPack, empty": (lambda: Exporter(np.zeros((2, 0, 3), np.int8)), np.zeros((2, 0, 3), np.int8)),
    "DLPack, bool": (lambda: Exporter(np.array([True, False])), np.array([True, False])),
    "DLPack, complex": (lambda: Exporter(np.array([1j, 2])), np.array([1j, 2])),
}
"""Name, what makes the input, and its values as a plain array. Every call makes a new one."""
