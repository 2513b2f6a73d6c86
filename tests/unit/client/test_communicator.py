from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

from allreduced.client import (
    Communicator,
    DeadlineExceeded,
    InvalidArgument,
    MismatchError,
    RankLost,
    WaitTimeout,
    connect,
)
from allreduced.core.dtypes import DType
from allreduced.protocol.local import (
    HIGHEST_VERSION,
    LOWEST_VERSION,
    AllocateArena,
    Hello,
    ReleaseLeases,
    Submit,
    ToAgent,
    Upload,
)

if TYPE_CHECKING:
    from tests.unit.client.conftest import Client, FakeAgent, MakeAgent

LARGE = 100_000
"""Elements that do not fit inside a message."""


def test_a_small_tensor_travels_inside_the_messages(agent: FakeAgent, comm: Communicator) -> None:
    y = comm.all_reduce(np.arange(6, dtype=np.float32).reshape(2, 3))
    np.testing.assert_array_equal(y, np.arange(6, dtype=np.float32).reshape(2, 3))
    assert y.flags.writeable
    assert y.flags.c_contiguous
    assert agent.count(AllocateArena) == 0


def test_deterministic_asks_for_the_canonical_order(agent: FakeAgent, comm: Communicator) -> None:
    x = np.ones(3, np.float32)
    comm.all_reduce(x, deterministic=True)
    comm.all_reduce_many([x, x.astype("int64")], deterministic=True, algorithm="canonical")
    comm.all_reduce(x, algorithm="ring")
    comm.all_reduce(x)
    algorithms = [message.algorithm for message in agent.seen if isinstance(message, Submit)]
    assert algorithms == ["canonical"] * 3 + ["ring", ""]
    with pytest.raises(InvalidArgument, match="deterministic=True allows only algorithm='canonical', not 'ring'"):
        comm.all_reduce(x, deterministic=True, algorithm="ring")


def test_a_large_tensor_is_staged_in_an_arena_and_its_lease_returns_at_once(
    agent: FakeAgent, comm: Communicator
) -> None:
    x = np.arange(LARGE, dtype=np.float64)
    y = comm.all_reduce(x)
    np.testing.assert_array_equal(y, x)
    y[0] = 1  # ours
    agent.until(lambda: agent.count(ReleaseLeases) == 1)
    assert not agent.leases
    comm.all_reduce(x)
    assert agent.count(AllocateArena) == 1


def test_an_array_made_by_empty_is_not_copied(agent: FakeAgent, comm: Communicator) -> None:
    buf = comm.empty((LARGE,), "int64")
    buf[:] = 3
    comm.all_reduce(buf)
    comm.all_reduce(buf[1000:], name="part")
    submits = [message for message in agent.seen if isinstance(message, Submit)]
    assert submits[1].offset - submits[0].offset == 8000
    assert submits[0].arena == submits[1].arena
    assert agent.count(AllocateArena) == 1


def test_memory_of_empty_is_used_again_when_all_its_views_are_gone(comm: Communicator) -> None:
    first = comm.empty(LARGE)
    address = first.ctypes.data
    view = first[10:20]
    del first
    second = comm.empty(LARGE)
    assert second.ctypes.data != address
    del view
    assert comm.empty(LARGE).ctypes.data == address


def test_memory_in_flight_is_not_used_again(agent: FakeAgent, comm: Communicator) -> None:
    agent.hold = True
    buf = comm.zeros(LARGE)
    address = buf.ctypes.data
    work = comm.all_reduce(buf, name="a", async_op=True)
    del buf
    others = [comm.empty(LARGE) for _ in range(3)]
    assert address not in {other.ctypes.data for other in others}
    agent.complete("a")
    np.testing.assert_array_equal(work.wait(), np.zeros(LARGE, np.float32))
    assert comm.empty(LARGE).ctypes.data == address


def test_zeros_of_recycled_memory_are_zero(comm: Communicator) -> None:
    buf = comm.empty(LARGE, np.float32)
    buf.fill(7)
    del buf
    assert not comm.zeros(LARGE, np.float32).any()


def test_a_view_is_read_only_and_keeps_its_lease_until_the_last_view_is_gone(
    agent: FakeAgent, comm: Communicator
) -> None:
    x = np.arange(LARGE, dtype=np.float32)
    view = comm.all_reduce(x, view=True)
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    part = view[5:10]
    del view
    assert len(agent.leases) == 1
    np.testing.assert_array_equal(part, x[5:10])
    del part
    agent.until(lambda: not agent.leases)


def test_a_small_view_is_read_only_too(comm: Communicator) -> None:
    assert not comm.all_reduce(np.ones(3), view=True).flags.writeable


def test_out_may_be_the_input_and_need_not_be_contiguous(comm: Communicator) -> None:
    x = np.arange(2 * LARGE, dtype=np.float32).reshape(LARGE, 2)
    column = x[:, 0]
    expected = column.copy()
    assert comm.all_reduce(column, out=column) is column
    np.testing.assert_array_equal(x[:, 0], expected)
    y = np.zeros((3, 5), order="F")
    assert comm.all_reduce(np.ones((3, 5)), out=y) is y
    assert y.sum() == 15


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (np.zeros(4), r"out has shape \(4,\), the result has \(3,\)"),
        (np.zeros(3, np.float32), "out has dtype float32, the result has float64"),
        (np.broadcast_to(np.zeros(1), (3,)), "out has elements that share memory"),
        (np.frombuffer(bytes(24)), "out is read-only"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(comm: Communicator, out: np.ndarray, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        comm.all_reduce(np.ones(3), out=out)


def test_results_may_come_in_another_order_than_calls(agent: FakeAgent, comm: Communicator) -> None:
    agent.hold = True
    works = {name: comm.all_reduce(np.full(LARGE, float(ord(name))), name=name, async_op=True) for name in "abc"}
    for name in "cab":
        agent.complete(name)
    for name in "abc":
        assert works[name].wait()[0] == ord(name)
        info = works[name].info
        assert info is not None
        assert (info.participants, info.algorithm, info.elapsed, info.nbytes) == ((0,), "fake", 0.25, 8 * LARGE)


def test_a_timeout_ends_the_wait_and_not_the_operation(agent: FakeAgent, comm: Communicator) -> None:
    agent.hold = True
    work = comm.all_reduce(np.ones(3), name="late", async_op=True)
    with pytest.raises(WaitTimeout, match="it goes on"):
        work.wait(timeout=0.01)
    assert not work.done()
    assert work.exception() is None
    agent.complete("late")
    result = work.wait(timeout=20)
    assert result.tolist() == [1, 1, 1]
    assert work.wait() is result
    assert work.done()


def test_an_error_of_the_agent_is_raised_with_its_facts(agent: FakeAgent, comm: Communicator) -> None:
    agent.hold = True
    work = comm.all_reduce(np.ones(LARGE), name="x", async_op=True)
    agent.fail("x", DeadlineExceeded("rank 3 did not come", missing=[3]))
    with pytest.raises(DeadlineExceeded) as caught:
        work.wait()
    assert caught.value.missing == (3,)
    assert isinstance(work.exception(), DeadlineExceeded)
    agent.hold = False
    assert comm.all_reduce(np.ones(2)).tolist() == [1, 1]


def test_an_ended_group_takes_no_more_calls(agent: FakeAgent, comm: Communicator) -> None:
    agent.hold = True
    work = comm.all_reduce(np.ones(1), name="x", async_op=True)
    agent.end_group(RankLost("rank 1 is gone", ranks=[1], nodes=["b"]))
    agent.fail("x", RankLost("rank 1 is gone", ranks=[1], nodes=["b"]))
    with pytest.raises(RankLost):
        work.wait()
    with pytest.raises(RankLost) as caught:
        comm.barrier()
    assert caught.value.ranks == (1,)


def test_two_ranks_reduce_and_a_mismatch_reaches_both(agent: FakeAgent) -> None:
    results: dict[int, object] = {}

    def run(rank: int) -> None:
        with connect(socket=agent.socket, job="two", rank=rank, size=2) as comm:
            x = np.full(LARGE, rank + 1, np.int32)
            results[rank] = (comm.ranks, comm.local_size, comm.local_rank, comm.all_reduce(x, op="prod")[0])
            try:
                comm.all_reduce(np.ones((rank + 1, 2)))
            except MismatchError as error:
                results[rank + 10] = error.by_rank

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == ((0, 1), 2, 0, 2)
    assert results[1] == ((0, 1), 2, 1, 2)
    assert results[10] == results[11] == {0: "(1, 2)", 1: "(2, 2)"}


def test_threads_may_wait_for_different_works(agent: FakeAgent, comm: Communicator) -> None:
    agent.hold = True
    works = [comm.all_reduce(np.full(LARGE, float(i)), name=str(i), async_op=True) for i in range(6)]
    seen: dict[int, float] = {}

    def run(i: int) -> None:
        seen[i] = float(works[i].wait()[0])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    # While the others wait, this thread submits and waits too.
    agent.hold = False
    assert comm.all_reduce(np.ones(LARGE), name="now")[0] == 1.0
    for i in (3, 0, 5, 1, 4, 2):
        agent.complete(str(i))
    for thread in threads:
        thread.join()
    assert seen == {i: float(i) for i in range(6)}


@pytest.mark.parametrize("dtype", DType)
def test_tensors_of_every_dtype_come_back_as_they_went(agent: FakeAgent, comm: Communicator, dtype: DType) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else dtype.label)
    large = comm.zeros(LARGE, kind)
    for x in (comm.zeros(3, kind), large):
        x[1::3] = 1
        assert x.dtype == kind
        y = comm.all_reduce(x)
        assert (y.dtype, y.tobytes()) == (kind, x.tobytes())
        view = comm.all_reduce(x, view=True)
        assert (view.dtype, view.tobytes(), view.flags.writeable) == (kind, x.tobytes(), False)
        out = np.zeros((2, x.size), kind)[1]
        assert comm.all_reduce(x, out=out) is out
        assert out.tobytes() == x.tobytes()
    assert agent.count(AllocateArena) == 1  # nothing was staged
    first, second = comm.all_reduce_many([large[:5], large.reshape(2, -1)])
    assert (first.dtype, first.tobytes()) == (kind, large[:5].tobytes())
    assert (second.shape, second.tobytes()) == ((2, LARGE // 2), large.tobytes())


def test_bfloat16_arrays_need_ml_dtypes() -> None:
    script = """
from allreduced.client.place import check_shape
from allreduced.core.errors import InvalidArgument
try:
    check_shape(3, "bfloat16")
except InvalidArgument as error:
    assert "import ml_dtypes" in error.hint, error
    import ml_dtypes
    assert check_shape(3, "bfloat16") == check_shape((3,), ml_dtypes.bfloat16)
    print("as told")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("as told\n", "")


@pytest.mark.parametrize("shape", [1 << 62, (1 << 62, 1 << 10), (1 << 31, 1 << 17, 2)])
def test_arrays_beyond_any_machine_are_refused_and_the_group_goes_on(
    agent: FakeAgent, comm: Communicator, shape: int | tuple[int, ...]
) -> None:
    for make in (comm.empty, comm.zeros):
        with pytest.raises(InvalidArgument, match="no agent can share so much memory"):
            make(shape, "float32")
    assert comm.all_reduce(np.ones(3)).tolist() == [1, 1, 1]


def test_broadcast_sends_only_from_the_root(agent: FakeAgent, comm: Communicator) -> None:
    assert comm.broadcast(np.arange(3)).tolist() == [0, 1, 2]
    with pytest.raises(InvalidArgument, match="root is 1; with size 1 it is 0 to 0"):
        comm.broadcast(np.arange(3), root=1)
    with pytest.raises(InvalidArgument, match="root"):
        comm.broadcast(np.arange(3), root=-1)


def test_barrier_and_empty_tensors_have_no_data(agent: FakeAgent, comm: Communicator) -> None:
    comm.barrier()
    assert comm.barrier(async_op=True).wait() is None
    y = comm.all_reduce(np.zeros((0, 4), np.int32))
    assert y.shape == (0, 4)
    assert y.dtype == np.int32
    assert comm.all_reduce(np.array(2.5)).shape == ()
    assert comm.all_reduce(np.array(2.5)) == 2.5


@pytest.mark.parametrize(
    "bad",
    [
        {"deadline": 0.0},
        {"deadline": -1},
        {"deadline": True},
        {"deadline": float("inf")},
        {"deadline": float("nan")},
        {"priority": 1 << 31},
        {"name": "x" * 257},
        {"op": "median"},
        {"algorithm": "a" * 65},
        {"deadline": "soon"},
        {"priority": 1.5},
        {"priority": True},
        {"name": 3},
        {"op": ["sum"]},
        {"op": None},
        {"algorithm": 5},
    ],
)
def test_arguments_out_of_range_are_refused_here(agent: FakeAgent, comm: Communicator, bad: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        comm.all_reduce(np.ones(3), **bad)  # type: ignore[call-overload]  # wrong on purpose
    assert agent.count(Submit) == 0


def test_whole_numbers_of_numpy_are_whole_numbers(comm: Communicator) -> None:
    x = np.arange(3.0)
    assert comm.broadcast(x, root=np.int64(0), priority=np.int32(2)).tolist() == [0.0, 1.0, 2.0]  # type: ignore[call-overload]  # more than promised


def test_mean_of_integers_and_unknown_dtypes_are_refused(comm: Communicator) -> None:
    with pytest.raises(InvalidArgument, match="mean of int64"):
        comm.all_reduce(np.arange(3), op="mean")
    with pytest.raises(InvalidArgument, match=r"(longdouble|float128).*float32, float64, int32, int64"):
        comm.all_reduce(np.zeros(3, np.longdouble))
    with pytest.raises(InvalidArgument, match=r"max of complex128 is not defined.*sum, mean, prod"):
        comm.all_reduce(np.zeros(3, complex), op="max")
    with pytest.raises(InvalidArgument, match="byte order"):
        comm.all_reduce(np.zeros(3, ">f8"))
    with pytest.raises(InvalidArgument, match="list, which is no tensor"):
        comm.all_reduce([1.0, 2.0])  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="exclude"):
        comm.all_reduce(np.ones(2), view=True, out=np.ones(2))
    for tensors in (None, 3):
        with pytest.raises(InvalidArgument, match="a list of tensors"):
            comm.all_reduce_many(tensors)  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="a list of tensors"):
        comm.all_reduce_many([np.ones(1)], out=3)  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="shape"):
        comm.empty((-1,))
    with pytest.raises(InvalidArgument, match="shape"):
        comm.empty(("3",))  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="is not supported"):
        comm.empty(3, "float17")


def test_without_shared_memory_tensors_travel_in_pieces(agent: FakeAgent) -> None:
    x = np.arange(400_001, dtype=np.float64)
    with connect(socket=agent.socket, job="j", rank=0, size=1, shared_memory=False) as comm:
        works = [comm.all_reduce(x * i, async_op=True) for i in range(4)]
        for i, work in enumerate(works):
            np.testing.assert_array_equal(work.wait(), x * i)
        out = np.zeros((2, 400_001))
        comm.all_reduce(np.stack([x, x]).T, out=out.T)
        np.testing.assert_array_equal(out, np.stack([x, x]))
        assert comm.empty(LARGE).shape == (LARGE,)
    assert agent.count(AllocateArena) == 0
    assert agent.count(Upload) >= 16
    assert not agent.leases


def test_where_no_arena_is_to_be_had_tensors_travel_in_pieces(make_agent: MakeAgent) -> None:
    from allreduced.core.errors import LimitExceeded, to_wire
    from allreduced.protocol.local import RequestFailed

    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        if isinstance(message, AllocateArena):
            client.send(RequestFailed(message.request, to_wire(LimitExceeded("full", limit="memory.total"))))
            return True
        return False

    agent = make_agent(script)
    with connect(socket=agent.socket, job="j", rank=0, size=1) as comm:
        np.testing.assert_array_equal(comm.all_reduce(np.arange(LARGE)), np.arange(LARGE))
        with pytest.raises(LimitExceeded, match="full"):
            comm.empty(LARGE)
    assert agent.count(Upload) == 1
    assert agent.count(AllocateArena) == 4


def test_calls_keep_their_order_while_one_waits_for_an_arena(agent: FakeAgent, comm: Communicator) -> None:
    works = [comm.all_reduce(np.full(size, 1.0), async_op=True) for size in (LARGE, 1, 8 * LARGE, 2)]
    for work in works:
        work.wait()
    assert [message.count for message in agent.seen if isinstance(message, Submit)] == [LARGE, 1, 8 * LARGE, 2]


def test_the_hello_says_who_we_are(agent: FakeAgent, comm: Communicator) -> None:
    assert agent.seen[0] == Hello(LOWEST_VERSION, HIGHEST_VERSION, os.getpid(), True)
    assert (comm.job, comm.group, comm.rank, comm.size, comm.node, comm.nodes, comm.generation) == (
        "test",
        "world",
        0,
        1,
        0,
        ("node-a",),
        1,
    )


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("-inf"), "soon", True, None])
def test_the_timeout_of_a_wait(agent: FakeAgent, comm: Communicator, bad: object) -> None:
    agent.hold = True
    work = comm.all_reduce(np.ones(2), name="x", async_op=True)
    if bad is not None:
        with pytest.raises(InvalidArgument, match="timeout is"):
            work.wait(timeout=bad)  # type: ignore[arg-type]  # that is the test
    with pytest.raises(WaitTimeout, match="within 0 s"):
        work.wait(timeout=0)
    agent.complete("x")
    assert work.wait(timeout=float("inf")).tolist() == [1.0, 1.0]
