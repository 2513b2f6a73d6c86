"""The collectives that move tensors between ranks, or nothing at all, for an event loop."""

from __future__ import annotations

from typing import TypeVar, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from allreduced.client import call
from allreduced.client.arrays import Array, Foreign, TorchT
from allreduced.client.async_work import AsyncWork
from allreduced.client.keywords import MoveKeywords, MoveToArray
from allreduced.client.starter import AsyncStarter

ScalarT = TypeVar("ScalarT", bound=np.generic)


class AsyncMoving(AsyncStarter):
    """Part of :class:`AsyncCommunicator`: ``broadcast``, ``barrier``."""

    @overload
    def broadcast(
        self, x: npt.NDArray[ScalarT], root: int = ..., *, async_op: bool = ..., **keywords: Unpack[MoveToArray]
    ) -> AsyncWork[npt.NDArray[ScalarT]]: ...

    @overload
    def broadcast(
        self,
        x: TorchT,
        root: int = ...,
        *,
        out: TorchT | None = ...,
        async_op: bool = ...,
        **keywords: Unpack[MoveKeywords],
    ) -> AsyncWork[TorchT]: ...

    @overload
    def broadcast(
        self, x: Foreign, root: int = ..., *, async_op: bool = ..., **keywords: Unpack[MoveToArray]
    ) -> AsyncWork[Array]: ...

    def broadcast(
        self,
        x: object,
        root: int = 0,
        *,
        out: object = None,
        view: bool = False,
        name: str | None = None,
        deadline: float | None = None,
        priority: int = 0,
        algorithm: str | None = None,
        async_op: bool = True,
    ) -> object:
        """Give every rank the ``x`` of rank ``root``; on the others ``x`` only tells shape and dtype."""
        del async_op
        options = call.Options(name, deadline, priority, algorithm)
        operation = call.broadcast(x, root=root, rank=self.rank, size=self.size, out=out, view=view, options=options)
        return self._start(operation)

    def barrier(
        self, *, name: str | None = None, deadline: float | None = None, priority: int = 0, async_op: bool = True
    ) -> AsyncWork[None]:
        """Wait until all ranks have called it."""
        del async_op
        operation = call.barrier(options=call.Options(name, deadline, priority, None))
        return cast("AsyncWork[None]", self._start(operation))
