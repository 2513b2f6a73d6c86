from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from allreduced.client import (
    AgentUnavailable,
    ClosedError,
    Communicator,
    DeadlineExceeded,
    InvalidArgument,
    MismatchError,
    ProtocolError,
    RankLost,
    WaitTimeout,
    connect,
)
from allreduced.core.dtypes import DType
from allreduced.protocol.local import (
    HIGHEST_VERSION,
    LOWEST_VERSION,
    AllocateArena,
    ArenaGranted,
    Done,
    Hello,
    Leave,
    ReleaseLeases,
    ResultArena,
    Submit,
    ToAgent,
    Upload,
    encode,
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


def test_views_stay_valid_after_close_and_hold_the_connection(agent: FakeAgent, comm: Communicator) -> None:
    view = comm.all_reduce(np.full(LARGE, 2.0), view=True)
    comm.close()
    agent.until(lambda: agent.count(Leave) == 1)
    assert len(agent.leases) == 1
    assert len(agent.clients) == 1
    assert view[-1] == 2.0
    del view
    agent.until(lambda: not agent.clients)


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


def test_the_end_of_the_agent_ends_everything_at_once(agent: FakeAgent, comm: Communicator) -> None:
    agent.hold = True
    works = [comm.all_reduce(np.ones(LARGE), name=name, async_op=True) for name in "ab"]
    view_before = comm.empty(LARGE)
    agent.until(lambda: agent.count(Submit) == 2)
    agent.kill()
    for work in works:
        with pytest.raises(AgentUnavailable, match="ended"):
            work.wait()
    with pytest.raises(AgentUnavailable):
        comm.all_reduce(np.ones(1))
    with pytest.raises(AgentUnavailable):
        comm.empty(LARGE)
    view_before.fill(1)  # still mapped


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
    assert [(submit.name, submit.count) for submit in submits] == [("grads", 6 + LARGE + 1), ("grads/int64", 4)]
    assert submits[0].shape == submits[1].shape == "(2, 3);(4,);(100000,);()"


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


def test_an_empty_list_is_no_operation(agent: FakeAgent, comm: Communicator) -> None:
    assert comm.all_reduce_many([]) == []
    none: list[npt.NDArray[np.float32]] = []
    assert comm.all_reduce_many(none, async_op=True).wait() == []
    assert agent.count(Submit) == 0


def test_the_first_error_of_several_parts_wins(agent: FakeAgent, comm: Communicator) -> None:
    agent.hold = True
    tensors: list[npt.NDArray[np.floating]] = [np.ones(3), np.ones(3, np.float32)]
    out: list[npt.NDArray[np.floating]] = [np.zeros(3), np.zeros(3, np.float32)]
    work = comm.all_reduce_many(tensors, name="m", out=out, async_op=True)
    agent.fail("m/float64", RankLost("gone", ranks=[1]))
    with pytest.raises(RankLost):
        work.wait()
    agent.complete("m")
    comm.barrier()
    assert not out[0].any()
    assert not out[1].any()


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


def test_close_is_orderly_and_ends_what_is_pending(agent: FakeAgent, comm: Communicator) -> None:
    agent.hold = True
    work = comm.all_reduce(np.ones(1), name="x", async_op=True)
    comm.close()
    comm.close()
    agent.until(lambda: agent.count(Leave) == 1 and not agent.clients)
    with pytest.raises(ClosedError):
        work.wait()
    with pytest.raises(ClosedError):
        comm.all_reduce(np.ones(1))
    with pytest.raises(ClosedError):
        comm.empty(LARGE)


def test_a_dropped_communicator_leaves(agent: FakeAgent) -> None:
    comm = connect(socket=agent.socket, job="j", rank=0, size=1)
    comm.barrier()
    del comm
    gc.collect()
    agent.until(lambda: agent.count(Leave) == 1 and not agent.clients)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_cannot_use_the_communicator_and_does_not_disturb_the_parent(
    agent: FakeAgent, comm: Communicator
) -> None:
    comm.all_reduce(np.ones(LARGE))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            comm.barrier()
        except ClosedError as error:
            status = 0 if "connect() again" in str(error) else 2
            with connect(socket=agent.socket, job="child", rank=0, size=1) as own:
                status = 0 if own.all_reduce(np.ones(LARGE))[0] == 1 and status == 0 else 3
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert comm.all_reduce(np.ones(LARGE))[0] == 1


def test_an_interrupted_wait_can_be_repeated(agent: FakeAgent, comm: Communicator) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    agent.hold = True
    work = comm.all_reduce(np.ones(LARGE), name="x", async_op=True)

    def interrupted() -> None:
        agent.order(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        work.wait()

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        signal.signal(signal.SIGUSR1, before)
    agent.complete("x")
    assert work.wait()[0] == 1


def test_close_in_another_thread_ends_a_wait(
    agent: FakeAgent, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allreduced.client.session.SLICE_SECONDS", 0.01)
    agent.hold = True
    view = comm.all_reduce(np.ones(LARGE), view=True)  # keeps the connection open after close()
    work = comm.all_reduce(np.ones(1), name="x", async_op=True)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait()
        except ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    comm.close()
    thread.join(20)
    assert len(ended) == 1
    assert view[0] == 1


SCRIPT = """
import numpy as np
from allreduced.client import connect
comm = connect(socket={socket!r}, job="script", rank=0, size=1)
comm.all_reduce(np.ones(100_000))
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "view = comm.all_reduce(np.ones(100_000), view=True)"])
def test_a_script_that_just_ends_leaves_orderly(agent: FakeAgent, end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.format(socket=agent.socket, end=end)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    agent.until(lambda: agent.count(Leave) == 1 and not agent.clients)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_of_multiprocessing_leaves_orderly(agent: FakeAgent) -> None:
    def child(socket: str) -> None:
        connect(socket=socket, job="child", rank=0, size=1).barrier()

    process = multiprocessing.get_context("fork").Process(target=child, args=(agent.socket,))
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()
    agent.until(lambda: agent.count(Leave) == 1 and not agent.clients)


def test_no_descriptors_are_left(agent: FakeAgent) -> None:
    def count() -> int:
        gc.collect()
        agent.until(lambda: not agent.clients)
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def use() -> None:
        with connect(socket=agent.socket, job="j", rank=0, size=1) as comm:
            view = comm.all_reduce(comm.zeros(LARGE), view=True)
            comm.all_reduce(np.ones(3 * LARGE))
            assert view[0] == 0
            del view

    use()
    agent.until(lambda: agent.ended == 1)
    before = count()
    for i in range(3):
        use()
        agent.until(lambda: agent.ended == i + 2)  # noqa: B023  # called before the next round
    # The agent keeps its own result arenas: one for each new result that found no room.
    assert count() - before <= 2 * (len(agent._arenas))


GARBAGE = {
    "no msgpack": b"\x04\0\0\0\xff\xff\xff\xff",
    "no length": b"\0\0\0\0",
    "huge": b"\xff\xff\xff\xff",
    "to the other side": encode(Leave(7)),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_ends_the_connection(make_agent: MakeAgent, data: bytes) -> None:
    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        if isinstance(message, Submit):
            client.send_bytes(data)
            return True
        return False

    comm = connect(socket=make_agent(script).socket, job="j", rank=0, size=1)
    with pytest.raises(ProtocolError):
        comm.all_reduce(np.ones(3))
    with pytest.raises(ProtocolError):
        comm.barrier()
    comm.close()


def _done(submit: Submit, **changes: object) -> Done:
    fields: dict[str, object] = {
        "request": submit.request,
        "payload": None,
        "arena": -1,
        "offset": 0,
        "nbytes": 0,
        "lease": 0,
        "pieces": False,
        "participants": (),
        "algorithm": "x",
        "elapsed": 0.0,
    }
    return Done(**{**fields, **changes})  # type: ignore[arg-type]  # the point is to try wrong combinations


@pytest.mark.parametrize(
    "changes",
    [
        {"request": 12345},
        {"payload": b"1234567"},
        {"arena": 3, "nbytes": 24, "lease": 1},
        {},
        {"pieces": True},
    ],
    ids=["unknown request", "short payload", "unknown arena", "no result", "pieces that never come right"],
)
def test_a_result_that_cannot_be_ends_the_connection(make_agent: MakeAgent, changes: dict[str, object]) -> None:
    from allreduced.protocol.local import Download

    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        if isinstance(message, Submit):
            client.send(_done(message, **changes))
            if changes.get("pieces"):
                client.send(Download(message.request, b"x" * 25, last=True))
            return True
        return False

    comm = connect(socket=make_agent(script).socket, job="j", rank=0, size=1)
    with pytest.raises(ProtocolError):
        comm.all_reduce(np.ones(3))
    comm.close()


def test_a_descriptor_that_is_too_short_is_refused(make_agent: MakeAgent) -> None:
    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        if isinstance(message, AllocateArena):
            descriptor = os.memfd_create("short")
            client.send(ArenaGranted(message.request, 5, message.nbytes), descriptor)
            os.close(descriptor)
            return True
        return False

    comm = connect(socket=make_agent(script).socket, job="j", rank=0, size=1)
    with pytest.raises(ProtocolError, match="its memory is shorter"):
        comm.empty(LARGE)
    comm.close()


def test_a_message_without_its_descriptor_is_refused(make_agent: MakeAgent) -> None:
    def script(agent: FakeAgent, client: Client, message: ToAgent) -> bool:
        if isinstance(message, Submit):
            client.send(ResultArena(1, 7, 4096))
            return True
        return False

    comm = connect(socket=make_agent(script).socket, job="j", rank=0, size=1)
    with pytest.raises(ProtocolError, match="without its descriptor"):
        comm.all_reduce(np.ones(3))
    comm.close()


def test_an_agent_that_never_answers_does_not_hang_a_wait(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allreduced.client.session.GRACE_SECONDS", 0.0)
    agent = make_agent(lambda agent, client, message: isinstance(message, Submit))
    comm = connect(socket=agent.socket, job="j", rank=0, size=1)
    with pytest.raises(AgentUnavailable, match="did not answer"):
        comm.all_reduce(np.ones(3), deadline=0.02)
    comm.close()


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
