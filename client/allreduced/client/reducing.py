"""The collectives that combine the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar, Unpack, overload

import numpy as np
import numpy.typing as npt

from allreduced.client import call
from allreduced.client.arrays import Array, Foreign, TorchT
from allreduced.client.keywords import ReduceKeywords, ReduceToArray, ReduceToArrays
from allreduced.client.starter import Starter
from allreduced.client.work import Work

ScalarT = TypeVar("ScalarT", bound=np.generic)


class Reducing(Starter):
    """Part of :class:`Communicator`: ``all_reduce``, ``all_reduce_many``."""

    @overload
    def all_reduce(
        self, x: npt.NDArray[ScalarT], *, async_op: Literal[False] = ..., **keywords: Unpack[ReduceToArray]
    ) -> npt.NDArray[ScalarT]: ...

    @overload
    def all_reduce(
        self, x: npt.NDArray[ScalarT], *, async_op: Literal[True], **keywords: Unpack[ReduceToArray]
    ) -> Work[npt.NDArray[ScalarT]]: ...

    @overload
    def all_reduce(
        self, x: TorchT, *, out: TorchT | None = ..., async_op: Literal[False] = ..., **keywords: Unpack[ReduceKeywords]
    ) -> TorchT: ...

    @overload
    def all_reduce(
        self, x: TorchT, *, out: TorchT | None = ..., async_op: Literal[True], **keywords: Unpack[ReduceKeywords]
    ) -> Work[TorchT]: ...

    @overload
    def all_reduce(self, x: Foreign, *, async_op: Literal[False] = ..., **keywords: Unpack[ReduceToArray]) -> Array: ...

    @overload
    def all_reduce(self, x: Foreign, *, async_op: Literal[True], **keywords: Unpack[ReduceToArray]) -> Work[Array]: ...

    def all_reduce(
        self,
        x: object,
        *,
        op: str = "sum",
        out: object = None,
        view: bool = False,
        name: str | None = None,
        deadline: float | None = None,
        priority: int = 0,
        algorithm: str | None = None,
        deterministic: bool = False,
        async_op: bool = False,
    ) -> object:
        """Combine the ``x`` of all ranks element by element and give every rank the same bits.

        ``op``: sum, prod, mean (floats and complex), min, max, land, lor, lxor (all but complex), band, bor, bxor
        (integers and bool); docs/numerics.md says what they compute, exactly. All ranks give the same shape, dtype and
        op. The result is a new array in the kind of ``x`` (NumPy or torch), or is written to ``out``, which may be
        ``x`` itself and need not be contiguous. ``view=True`` returns a read-only view of the node's result instead of
        a copy; its memory is the agent's until the array and all views of it are gone, so don't keep many.

        ``deterministic=True``: values are combined in one order, the ranks of a node and then the nodes, whatever the
        size of the tensor and the settings of the agents: every run with the same inputs and the same ranks on each
        node gives the same bits. It is ``algorithm="canonical"``, and costs little.

        :raises InvalidArgument: a dtype, op, shape or ``out`` that cannot be; no other rank is affected.
        :raises MismatchError: ranks called it differently; on all of them.
        :raises DeadlineExceeded: not all ranks came, or data did not, by the deadline.
        :raises RankLost: a process of the group ended.
        :raises PeerLost: an agent of the group did.
        :raises AgentUnavailable: this node's agent did.
        :raises LimitExceeded: the agent has no memory for it, or this client holds too many views.
        """
        options = call.Options(name, deadline, priority, algorithm, deterministic)
        return self._start(call.all_reduce(x, op=op, out=out, view=view, options=options), async_op)

    @overload
    def all_reduce_many(
        self,
        tensors: Sequence[npt.NDArray[ScalarT]],
        *,
        async_op: Literal[False] = ...,
        **keywords: Unpack[ReduceToArrays],
    ) -> list[npt.NDArray[ScalarT]]: ...

    @overload
    def all_reduce_many(
        self, tensors: Sequence[npt.NDArray[ScalarT]], *, async_op: Literal[True], **keywords: Unpack[ReduceToArrays]
    ) -> Work[list[npt.NDArray[ScalarT]]]: ...

    @overload
    def all_reduce_many(
        self,
        tensors: Sequence[TorchT],
        *,
        out: Sequence[TorchT] | None = ...,
        async_op: Literal[False] = ...,
        **keywords: Unpack[ReduceKeywords],
    ) -> list[TorchT]: ...

    @overload
    def all_reduce_many(
        self,
        tensors: Sequence[TorchT],
        *,
        out: Sequence[TorchT] | None = ...,
        async_op: Literal[True],
        **keywords: Unpack[ReduceKeywords],
    ) -> Work[list[TorchT]]: ...

    @overload
    def all_reduce_many(
        self, tensors: Sequence[Foreign], *, async_op: Literal[False] = ..., **keywords: Unpack[ReduceToArrays]
    ) -> list[Array]: ...

    @overload
    def all_reduce_many(
        self, tensors: Sequence[Foreign], *, async_op: Literal[True], **keywords: Unpack[ReduceToArrays]
    ) -> Work[list[Array]]: ...

    def all_reduce_many(
        self,
        tensors: Sequence[object],
        *,
        op: str = "sum",
        out: Sequence[object] | None = None,
        view: bool = False,
        name: str | None = None,
        deadline: float | None = None,
        priority: int = 0,
        algorithm: str | None = None,
        deterministic: bool = False,
        async_op: bool = False,
    ) -> object:
        """Combine each tensor of the list with its counterparts on the other ranks, and return the list of results.

        The tensors of one dtype travel as one operation, so a list of many small ones costs little more than one of
        their total size. They may differ in shape and dtype; all ranks give the same list of shapes. ``out``: one
        array for each tensor; may be ``tensors`` itself. Everything else, and the errors, as :meth:`all_reduce`.
        An empty list is fine; the other ranks must give one too.
        """
        options = call.Options(name, deadline, priority, algorithm, deterministic)
        return self._start(call.all_reduce_many(tensors, op=op, out=out, view=view, options=options), async_op)
