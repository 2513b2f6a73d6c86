from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from allreduced.client import (
    Communicator,
    InvalidArgument,
    RankLost,
)
from allreduced.protocol.local import (
    Submit,
)

if TYPE_CHECKING:
    from tests.unit.client.conftest import FakeAgent

LARGE = 100_000
"""Elements that do not fit inside a message."""


def test_all_reduce_many_packs_each_dtype(agent: FakeAgent, comm: Communicator) -> None:
    tensors: list[npt.NDArray[np.number]] = [
        np.ones((2, 3), np.float32),
        np.arange(4),
        np.full((LARGE,), 2.0, np.float32),
        np.array(5, np.float32),
    ]
    results = comm.all_reduce_many(tensors, name="grads")
    for given, got in zip(tensors, results, strict=True):
        np.testing.assert_array_equal(got, given)
        assert got.dtype == given.dtype
        assert got.shape == given.shape
    submits = [message for message in agent.seen if isinstance(message, Submit)]
    assert [(submit.name, submit.count) for submit in submits] == [("grads", 6 + LARGE + 1), ("grads/int64#0", 4)]
    assert submits[0].shape == submits[1].shape == "float32(2, 3);int64(4,);float32(100000,);float32()"


def test_all_reduce_many_takes_any_collection_but_no_single_array(agent: FakeAgent, comm: Communicator) -> None:
    gradients = {"w": np.ones(3), "b": np.zeros(1)}
    assert [list(x) for x in comm.all_reduce_many(gradients.values())] == [[1, 1, 1], [0]]  # type: ignore[call-overload]
    for bad in (np.ones((2, 3)), 5.0, None):
        with pytest.raises(InvalidArgument, match="it must be a list of tensors"):
            comm.all_reduce_many(bad)  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="out is a ndarray"):
        comm.all_reduce_many([np.ones(3)], out=np.ones((1, 3)))  # type: ignore[call-overload]  # wrong on purpose
    assert agent.count(Submit) == 1


def test_all_reduce_many_in_place_and_as_views(agent: FakeAgent, comm: Communicator) -> None:
    tensors = [np.full(LARGE, float(i)) for i in range(3)]
    again = comm.all_reduce_many(tensors, op="mean", out=tensors)
    assert all(a is b for a, b in zip(again, tensors, strict=True))
    views = comm.all_reduce_many(tensors, view=True)
    assert [view[0] for view in views] == [0, 1, 2]
    assert len(agent.leases) == 1
    del views[:2]
    assert len(agent.leases) == 1
    del views
    agent.until(lambda: not agent.leases)


def test_neighbours_in_an_arena_are_not_packed(agent: FakeAgent, comm: Communicator) -> None:
    flat = comm.zeros(2 * LARGE)
    comm.all_reduce_many([flat[:LARGE], flat[LARGE:]])
    comm.all_reduce(flat)
    submits = [message for message in agent.seen if isinstance(message, Submit)]
    assert submits[0].offset == submits[1].offset


def test_an_empty_list_is_an_operation_that_others_can_meet(agent: FakeAgent, comm: Communicator) -> None:
    assert comm.all_reduce_many([]) == []
    none: list[npt.NDArray[np.float32]] = []
    assert comm.all_reduce_many(none, op="band", async_op=True).wait() == []
    submits = [message for message in agent.seen if isinstance(message, Submit)]
    assert [(submit.kind, submit.shape, submit.count) for submit in submits] == [("all_reduce_many", "", 0)] * 2
    with pytest.raises(InvalidArgument, match="reduction 'average' is not supported"):
        comm.all_reduce_many(none, op="average")


def test_operations_of_one_list_have_names_that_no_other_call_has(agent: FakeAgent, comm: Communicator) -> None:
    mixed: list[npt.NDArray[np.number]] = [np.ones(3), np.ones(3, np.float32)]
    comm.all_reduce(np.ones(3), name="x")
    comm.barrier()
    long = "é" * 128
    for name in ("x", None, "x", None, long):
        comm.all_reduce_many(mixed, name=name)
    names = [message.name for message in agent.seen if isinstance(message, Submit)][2:]
    digest = hashlib.sha256(long.encode()).hexdigest()
    assert names == [
        *("x", "x/float64#1", "", "/float64#1", "x", "x/float64#2", "", "/float64#2", long, f"{digest}/float64#0")
    ]


def test_the_first_error_of_several_parts_wins(agent: FakeAgent, comm: Communicator) -> None:
    agent.hold = True
    tensors: list[npt.NDArray[np.floating]] = [np.ones(3), np.ones(3, np.float32)]
    out: list[npt.NDArray[np.floating]] = [np.zeros(3), np.zeros(3, np.float32)]
    work = comm.all_reduce_many(tensors, name="m", out=out, async_op=True)
    agent.fail("m/float64#0", RankLost("gone", ranks=[1]))
    with pytest.raises(RankLost):
        work.wait()
    agent.complete("m")
    comm.barrier()
    assert not out[0].any()
    assert not out[1].any()
