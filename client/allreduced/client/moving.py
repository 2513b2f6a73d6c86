"""The collectives that move tensors between ranks, or nothing at all."""

from __future__ import annotations

from typing import Literal, TypeVar, Unpack, overload

import numpy as np
import numpy.typing as npt

from allreduced.client import call
from allreduced.client.arrays import Array, Foreign, TorchT
from allreduced.client.keywords import Keywords, MoveKeywords, MoveToArray
from allreduced.client.starter import Starter
from allreduced.client.work import Work

ScalarT = TypeVar("ScalarT", bound=np.generic)


class Moving(Starter):
    """Part of :class:`Communicator`: ``broadcast``, ``barrier``."""

    @overload
    def broadcast(
        self,
        x: npt.NDArray[ScalarT],
        root: int = ...,
        *,
        async_op: Literal[False] = ...,
        **keywords: Unpack[MoveToArray],
    ) -> npt.NDArray[ScalarT]: ...

    @overload
    def broadcast(
        self, x: npt.NDArray[ScalarT], root: int = ..., *, async_op: Literal[True], **keywords: Unpack[MoveToArray]
    ) -> Work[npt.NDArray[ScalarT]]: ...

    @overload
    def broadcast(
        self,
        x: TorchT,
        root: int = ...,
        *,
        out: TorchT | None = ...,
        async_op: Literal[False] = ...,
        **keywords: Unpack[MoveKeywords],
    ) -> TorchT: ...

    @overload
    def broadcast(
        self,
        x: TorchT,
        root: int = ...,
        *,
        out: TorchT | None = ...,
        async_op: Literal[True],
        **keywords: Unpack[MoveKeywords],
    ) -> Work[TorchT]: ...

    @overload
    def broadcast(
        self, x: Foreign, root: int = ..., *, async_op: Literal[False] = ..., **keywords: Unpack[MoveToArray]
    ) -> Array: ...

    @overload
    def broadcast(
        self, x: Foreign, root: int = ..., *, async_op: Literal[True], **keywords: Unpack[MoveToArray]
    ) -> Work[Array]: ...

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
        async_op: bool = False,
    ) -> object:
        """Give every rank the ``x`` of rank ``root``. On the others ``x`` only tells shape and dtype.

        Returns a new array (``x`` is not written unless it is also ``out``). ``view`` and errors as
        :meth:`all_reduce`.
        """
        options = call.Options(name, deadline, priority, algorithm)
        operation = call.broadcast(x, root=root, rank=self.rank, size=self.size, out=out, view=view, options=options)
        return self._start(operation, async_op)

    @overload
    def barrier(self, *, async_op: Literal[False] = ..., **keywords: Unpack[Keywords]) -> None: ...

    @overload
    def barrier(self, *, async_op: Literal[True], **keywords: Unpack[Keywords]) -> Work[None]: ...

    def barrier(
        self,
        *,
        name: str | None = None,
        deadline: float | None = None,
        priority: int = 0,
        async_op: bool = False,
    ) -> object:
        """Wait until all ranks have called it. Errors as :meth:`all_reduce`."""
        return self._start(call.barrier(options=call.Options(name, deadline, priority, None)), async_op)
