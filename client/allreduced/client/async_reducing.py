"""The collectives that combine the tensors of all ranks, for an event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, Unpack, overload

import numpy as np
import numpy.typing as npt

from allreduced.client import call
from allreduced.client.arrays import Array, Foreign, TorchT
from allreduced.client.async_work import AsyncWork
from allreduced.client.keywords import ReduceKeywords, ReduceToArray, ReduceToArrays
from allreduced.client.starter import AsyncStarter

ScalarT = TypeVar("ScalarT", bound=np.generic)


class AsyncReducing(AsyncStarter):
    """Part of :class:`AsyncCommunicator`: ``all_reduce``, ``all_reduce_many``."""

    @overload
    def all_reduce(
        self, x: npt.NDArray[ScalarT], *, async_op: bool = ..., **keywords: Unpack[ReduceToArray]
    ) -> AsyncWork[npt.NDArray[ScalarT]]: ...

    @overload
    def all_reduce(
        self, x: TorchT, *, out: TorchT | None = ..., async_op: bool = ..., **keywords: Unpack[ReduceKeywords]
    ) -> AsyncWork[TorchT]: ...

    @overload
    def all_reduce(
        self, x: Foreign, *, async_op: bool = ..., **keywords: Unpack[ReduceToArray]
    ) -> AsyncWork[Array]: ...

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
        async_op: bool = True,
    ) -> object:
        """Combine the ``x`` of all ranks element by element and give every rank the same bits."""
        del async_op
        options = call.Options(name, deadline, priority, algorithm, deterministic)
        return self._start(call.all_reduce(x, op=op, out=out, view=view, options=options))

    @overload
    def all_reduce_many(
        self, tensors: Sequence[npt.NDArray[ScalarT]], *, async_op: bool = ..., **keywords: Unpack[ReduceToArrays]
    ) -> AsyncWork[list[npt.NDArray[ScalarT]]]: ...

    @overload
    def all_reduce_many(
        self,
        tensors: Sequence[TorchT],
        *,
        out: Sequence[TorchT] | None = ...,
        async_op: bool = ...,
        **keywords: Unpack[ReduceKeywords],
    ) -> AsyncWork[list[TorchT]]: ...

    @overload
    def all_reduce_many(
        self, tensors: Sequence[Foreign], *, async_op: bool = ..., **keywords: Unpack[ReduceToArrays]
    ) -> AsyncWork[list[Array]]: ...

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
        async_op: bool = True,
    ) -> object:
        """Combine each tensor of the list with its counterparts on the other ranks; the result is their list."""
        del async_op
        options = call.Options(name, deadline, priority, algorithm, deterministic)
        return self._start(call.all_reduce_many(tensors, op=op, out=out, view=view, options=options))
