"""What type checkers say about the client; checked by mypy, never run."""

from __future__ import annotations

from typing import assert_type

import numpy as np
import numpy.typing as npt

from allreduced.client import AsyncCommunicator, AsyncWork, Communicator, Work, WorkInfo, connect
from allreduced.client.arrays import Array

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class Tensor:
    """Stands for torch.Tensor, which need not be installed."""

    @property
    def requires_grad(self) -> bool:
        return False

    def is_floating_point(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return 0


def blocking(comm: Communicator, x: Float32, n: Int64, t: Tensor, b: bytearray) -> None:
    assert_type(comm.all_reduce(x), Float32)
    assert_type(comm.all_reduce(x, op="mean", out=x, name="w", deadline=3, priority=1), Float32)
    assert_type(comm.all_reduce(x, async_op=False), Float32)
    assert_type(comm.all_reduce(n, view=True), Int64)
    assert_type(comm.all_reduce(x, deterministic=True), Float32)
    assert_type(comm.all_reduce_many([x], deterministic=True, async_op=True), Work[list[Float32]])
    assert_type(comm.all_reduce(t), Tensor)
    assert_type(comm.all_reduce(b), Array)

    assert_type(comm.all_reduce(x, async_op=True), Work[Float32])
    assert_type(comm.all_reduce(x, async_op=True).wait(timeout=5.0), Float32)
    assert_type(comm.all_reduce(t, async_op=True), Work[Tensor])
    assert_type(comm.all_reduce(b, async_op=True), Work[Array])

    assert_type(comm.all_reduce_many([x, x]), list[Float32])
    assert_type(comm.all_reduce_many([x, x], async_op=True), Work[list[Float32]])
    assert_type(comm.all_reduce_many([t, t]), list[Tensor])

    assert_type(comm.broadcast(x), Float32)
    assert_type(comm.broadcast(x, 1, async_op=True), Work[Float32])
    assert_type(comm.broadcast(t, root=0), Tensor)

    assert_type(comm.barrier(async_op=True), Work[None])
    assert_type(comm.barrier(async_op=True).info, WorkInfo | None)
    assert_type(comm.barrier(async_op=True).done(), bool)

    assert_type(comm.empty((2, 3)), Float32)
    assert_type(comm.empty(3, "float32"), Float32)
    assert_type(comm.empty((2, 3), np.int64), Int64)
    assert_type(comm.zeros(5, np.dtype(np.int64)), Int64)
    assert_type(comm.zeros((5,), "int64"), Array)

    assert_type(comm.ranks, tuple[int, ...])
    assert_type(comm.nodes, tuple[str, ...])

    with connect() as again:
        assert_type(again, Communicator)

    comm.all_reduce(3.5)  # type: ignore[call-overload]  # a Python number is no tensor
    comm.all_reduce(t, view=True)  # type: ignore[call-overload]  # torch has no read-only tensors


async def asynchronous(x: Float32, t: Tensor) -> None:
    async with AsyncCommunicator.connect() as comm:
        assert_type(comm, AsyncCommunicator)
        assert_type(comm.all_reduce(x), AsyncWork[Float32])
        assert_type(await comm.all_reduce(x, async_op=True), Float32)
        assert_type(await comm.all_reduce(t), Tensor)
        assert_type(await comm.all_reduce_many([x]), list[Float32])
        assert_type(await comm.broadcast(x, root=2), Float32)
        assert_type(comm.barrier(), AsyncWork[None])
        assert_type(await comm.empty((2, 3)), Float32)
        assert_type(await comm.zeros(3, np.float32), Float32)
    assert_type(await AsyncCommunicator.connect(), AsyncCommunicator)
