"""What memory arrays share: no element of ``out`` may be written twice, nor while it is still to be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_Array: TypeAlias = "npt.NDArray[np.generic]"

_MAX_WORK = 100_000
"""What NumPy may spend on one pair of strided arrays; those that are harder to tell apart count as overlapping."""


@dataclass(frozen=True, slots=True)
class Use:
    """One array of a call. ``order``: what is written in one order may overlap what is read in the same."""

    what: str
    array: _Array
    written: bool
    order: int


def overlaps_itself(array: _Array) -> bool:
    """Return True where two elements may lie in the same place, as in what broadcasting and sliding windows give."""
    if array.flags.c_contiguous or array.flags.f_contiguous or array.size <= 1:
        return False
    reach = array.itemsize
    for stride, extent in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if extent == 1:
            continue
        if stride < reach:
            return True
        reach += stride * (extent - 1)
    return False


def find_conflict(uses: Sequence[Use]) -> tuple[Use, Use] | None:
    """Return two that share memory though one of them is written: both are, or the other is read in another order."""
    spans = sorted(((*span(use.array), use) for use in uses if use.array.size), key=lambda found: found[:2])
    near: list[tuple[int, Use]] = []
    for start, end, use in spans:
        near = [(until, other) for until, other in near if until > start]
        for _, other in near:
            both = use.written and other.written
            apart = use.order != other.order and (use.written or other.written)
            if (both or apart) and _share(use.array, other.array):
                return other, use
        near.append((end, use))
    return None


def span(array: _Array) -> tuple[int, int]:
    """Return the addresses of the first byte and of the one behind the last."""
    start: int = array.__array_interface__["data"][0]
    if array.flags.c_contiguous:
        return start, start + array.nbytes
    reaches = [stride * (extent - 1) for stride, extent in zip(array.strides, array.shape, strict=True)]
    low = sum(reach for reach in reaches if reach < 0)
    high = sum(reach for reach in reaches if reach > 0)
    return start + low, start + high + array.itemsize


def _share(one: _Array, other: _Array) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MAX_WORK)  # type: ignore[arg-type]  # its stub knows two limits only
    except np.exceptions.TooHardError:
        return True
