"""What both communicators have: who and where this process is, and the checks of their arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from allreduced.client.arguments import whole
from allreduced.core.dtypes import DType, parse_dtype
from allreduced.core.errors import InvalidArgument
from allreduced.protocol.local import Joined

MAX_BYTES = 1 << 50
"""Bytes of one array that are asked for at most: above any memory, and below what a message can tell."""

Shape: TypeAlias = "int | Sequence[int]"


class Joiner(Protocol):
    """Who knows what group this process is in now; another one after the agent was lost and is back."""

    joined: Joined


class Place:
    """Who and where this process is in its group. The base of both communicators."""

    def __init__(self, joiner: Joiner, *, job: str, group: str) -> None:
        self._joiner = joiner
        self._job = job
        self._group = group

    @property
    def _joined(self) -> Joined:
        return self._joiner.joined

    @property
    def job(self) -> str:
        """The id of the job."""
        return self._job

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._group

    @property
    def rank(self) -> int:
        """This process's rank, from 0 to ``size - 1``."""
        return self._joined.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._joined.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The living ranks, ascending."""
        return tuple(sorted(rank for _, ranks in self._joined.nodes for rank in ranks))

    @property
    def local_rank(self) -> int:
        """The place of this process among the group's ranks on its node, from 0."""
        return self._joined.nodes[self._joined.node][1].index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of the group's ranks on this node."""
        return len(self._joined.nodes[self._joined.node][1])

    @property
    def node(self) -> int:
        """The index of this node in ``nodes``."""
        return self._joined.node

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, ordered by their lowest ranks."""
        return tuple(name for name, _ in self._joined.nodes)

    @property
    def generation(self) -> int:
        """Grows with every change of the group's members; the first is 1."""
        return self._joined.generation

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.group!r}: rank {self.rank} of {self.size}, node {self.nodes[self.node]!r}>"
        )


def check_shape(shape: Shape, dtype: npt.DTypeLike) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Return the shape as a tuple of ints, and NumPy's element type.

    :raises InvalidArgument: an extent is negative, there are more bytes than any machine has, the dtype is not in the
        table, or it is bfloat16 and NumPy has not learned it from ml_dtypes.
    """
    given = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    extents = tuple(extent for extent in map(whole, given) if extent is not None and extent >= 0)
    if len(extents) < len(given):
        raise InvalidArgument(f"shape is {shape!r}; it is a number or a sequence of numbers, none below 0")
    try:
        label = np.dtype(dtype).name
    except TypeError:
        label = str(dtype)
    known = parse_dtype(label)
    try:
        # In this machine's byte order, whatever that of `dtype`.
        kind = np.dtype(dtype if known is DType.BFLOAT16 else known.label)
    except TypeError as error:
        raise InvalidArgument(
            f"NumPy has no {label}",
            hint="import ml_dtypes, which brings it, or pass a tensor of torch, which need not come from empty()",
        ) from error
    if math.prod(extents) * kind.itemsize > MAX_BYTES:
        raise InvalidArgument(f"shape is {shape!r}: no agent can share so much memory")
    return extents, kind
