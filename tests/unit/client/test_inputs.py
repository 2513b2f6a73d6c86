"""What is accepted as a tensor, as ``out``, and what is refused, through the whole client."""

from __future__ import annotations

import array
import gc
import weakref

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.inputs import GRID, INPUTS, Array, Exporter, Interface, export
from tests.unit.client.conftest import INLINE_LIMIT, FakeAgent

from allreduced.client import AsyncCommunicator, Communicator, InvalidArgument, connect
from allreduced.client.overlap import overlaps_itself

LARGE = 2 * INLINE_LIMIT
"""Elements of a tensor that travels in shared memory, whatever its dtype."""


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_reduced_and_given_back_as_new_arrays(comm: Communicator, name: str) -> None:
    make, expected = INPUTS[name]
    result = comm.all_reduce(make())  # type: ignore[call-overload]  # all kinds there are
    assert type(result) is np.ndarray
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert result.tobytes() == expected.tobytes()
    assert result.flags.writeable
    assert result.flags.c_contiguous


@pytest.mark.parametrize("shared_memory", [True, False])
def test_large_inputs_of_any_layout_arrive_in_order(agent: FakeAgent, shared_memory: bool) -> None:
    whole = np.arange(6 * LARGE, dtype=np.float64).reshape(6, LARGE)
    layouts = {
        "fortran": np.asfortranarray(whole),
        "transposed": whole.T,
        "strided": whole[::2, ::-3],
        "broadcast": np.broadcast_to(whole[:, :1], whole.shape),
        "matrix": whole.view(np.matrix),
        "dlpack": Exporter(whole.T),
        "memoryview": whole.data,
        "column": whole[:, 5:6],
    }
    with connect(socket=agent.socket, job="large", rank=0, size=1, shared_memory=shared_memory) as comm:
        for name, x in layouts.items():
            result = comm.all_reduce(x)  # type: ignore[call-overload]  # all kinds there are
            expected = np.asarray(x.of if isinstance(x, Exporter) else x)
            np.testing.assert_array_equal(result, expected, name)


def test_a_list_may_mix_all_kinds(comm: Communicator) -> None:
    tensors: list[Array] = [make() for make, _ in INPUTS.values()]  # type: ignore[misc]  # all kinds there are
    results = comm.all_reduce_many(tensors)
    for result, (name, (_, expected)) in zip(results, INPUTS.items(), strict=True):
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape), name
        assert result.tobytes() == expected.tobytes(), name


async def test_asyncio_takes_the_same(agent: FakeAgent) -> None:
    async with AsyncCommunicator.connect(socket=agent.socket, job="test", rank=0, size=1) as comm:
        result = await comm.all_reduce(Exporter(GRID.T))
        assert isinstance(result, np.ndarray)
        np.testing.assert_array_equal(result, GRID.T)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1.0, 2.0], "x is a list, which is no tensor .*np.asarray"),
        ((1, 2), "x is a tuple"),
        (1.5, "x is a float, which is no tensor"),
        (3, "x is a int"),
        (None, "x is a NoneType"),
        ("abc", "x is a str"),
        (np.zeros(3, ">f4"), r"byte order \(>f4\) .*newbyteorder"),
        (Interface(np.zeros(3), typestr=">f8"), r"byte order \(>f8\)"),
        (np.zeros(3, [("a", "f4"), ("b", "i4")]), "dtype 'void64' is not supported; there are float32, .* complex128"),
        (np.array([{}, 1], object), "dtype 'object' is not supported; there are float32"),
        (np.zeros(3, "datetime64[s]"), "dtype 'datetime64.s.' is not supported"),
        (np.zeros(3, "timedelta64[s]"), "dtype 'timedelta64.s.' is not supported"),
        (np.array(["ab"]), "dtype 'str64' is not supported"),
        (memoryview(b"abc").cast("c"), "dtype 'bytes8' is not supported"),
        (array.array("u", "ab"), "dtype 'str32' is not supported"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), r"x is a masked array, .*x.filled\(0\)"),
        (Interface(np.zeros(3), typestr="<q7"), "which is no tensor|cannot be read"),
        (Interface(np.zeros(3), shape=None), "which is no tensor|cannot be read"),
        (Exporter(GRID, device=2), r"not in the memory of the CPU \(DLPack device 2, cuda\) .*x.cpu\(\)"),
        (Exporter(GRID, device=99), "DLPack device 99"),
    ],
)
def test_what_is_no_tensor_is_refused_with_what_to_do(comm: Communicator, value: object, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        comm.all_reduce(value)  # type: ignore[call-overload]  # that is the point
    assert comm.all_reduce(GRID)[2, 3] == 11


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy 2 brings them")
def test_texts_of_any_length_are_refused(comm: Communicator) -> None:
    with pytest.raises(InvalidArgument, match=r"dtype 'StringDType.*' is not supported"):
        comm.all_reduce(np.array(["ab"], np.dtypes.StringDType()))


def test_a_released_memoryview_is_refused(comm: Communicator) -> None:
    view = memoryview(bytearray(8))
    view.release()
    with pytest.raises(InvalidArgument, match="x cannot be read as an array: operation forbidden on released"):
        comm.all_reduce(view)


def test_a_list_names_the_tensor_that_is_wrong(comm: Communicator) -> None:
    with pytest.raises(InvalidArgument, match=r"tensors\[1\]: dtype 'object' is not supported"):
        comm.all_reduce_many([np.ones(2), np.array([{}])])


@pytest.mark.parametrize("old", [False, True])
def test_dlpack_memory_is_shared_until_its_reader_is_gone(comm: Communicator, old: bool) -> None:
    of = np.ones(LARGE)
    alive = weakref.ref(of)
    work = comm.all_reduce(Exporter(of, old=old), async_op=True)
    del of
    assert work.wait()[0] == 1
    del work
    gc.collect()
    assert alive() is None


def test_dlpack_takes_results_where_its_producer_allows(comm: Communicator) -> None:
    of = np.zeros((4, 3), np.float32)
    out = Exporter(of.T)
    assert comm.all_reduce(GRID.T.copy().T, out=out) is out  # type: ignore[call-overload]  # typed for arrays
    np.testing.assert_array_equal(of.T, GRID)
    for refused in (Exporter(of.T, old=True), Exporter(_frozen(of).T)):
        with pytest.raises(InvalidArgument, match="out is read-only"):
            comm.all_reduce(GRID, out=refused)  # type: ignore[call-overload]


class Taken(Exporter):
    """Gives its capsule twice."""

    def __init__(self, of: Array) -> None:
        super().__init__(of)
        self.capsule = export(of)

    def __dlpack__(self, **options: object) -> object:
        return self.capsule


class Refusing(Exporter):
    """Cannot export now."""

    def __dlpack__(self, **options: object) -> object:
        raise BufferError("sharded over two devices")


def test_a_capsule_is_taken_once(comm: Communicator) -> None:
    value = Taken(GRID.copy())
    assert comm.all_reduce(value)[0, 1] == 1
    with pytest.raises(InvalidArgument, match="was taken before"):
        comm.all_reduce(value)


def test_what_the_producer_says_is_passed_on(comm: Communicator) -> None:
    with pytest.raises(InvalidArgument, match="sharded over two devices"):
        comm.all_reduce(Refusing(GRID))


# out


@pytest.mark.parametrize(
    "make",
    [
        lambda shape: np.zeros(shape, order="F"),
        lambda shape: np.zeros((2 * shape[0], 3 * shape[1]))[::-2, ::3],
        lambda shape: np.zeros(shape[::-1]).T[::-1],
        lambda shape: np.zeros((*shape, 2))[..., 1],
        lambda shape: np.zeros(shape).view(np.matrix),
        lambda shape: np.zeros(shape).data,
    ],
    ids=["fortran", "negative", "transposed", "interleaved", "matrix", "memoryview"],
)
@pytest.mark.parametrize("rows", [3, LARGE])
def test_results_are_written_to_out_of_any_layout(comm: Communicator, make: object, rows: int) -> None:
    x = np.arange(4.0 * rows).reshape(rows, 4)
    out = make(x.shape)  # type: ignore[operator]
    assert comm.all_reduce(x, out=out) is out
    np.testing.assert_array_equal(np.asarray(out), x)


def test_out_without_dimensions_and_without_elements(comm: Communicator) -> None:
    out = np.array(0.0)
    assert comm.all_reduce(np.array(7.0), out=out) is out
    assert out == 7
    nothing = np.zeros((0, 2))
    assert comm.all_reduce(np.ones((0, 2)), out=nothing) is nothing


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shift", [-5, -1, 1, 5])
def test_an_out_that_overlaps_the_input_in_part_gets_the_right_result(
    comm: Communicator, shift: int, shared: bool
) -> None:
    memory = comm.zeros(2 * LARGE, np.float64) if shared else np.zeros(2 * LARGE)
    memory[:] = np.arange(2 * LARGE)
    x, out = memory[5 : 5 + LARGE], memory[5 + shift : 5 + shift + LARGE]
    expected = x.copy()
    assert comm.all_reduce(x, out=out) is out
    np.testing.assert_array_equal(out, expected)


def test_an_input_reversed_in_place(comm: Communicator) -> None:
    memory = np.arange(float(LARGE))
    comm.all_reduce(memory, out=memory[::-1])
    np.testing.assert_array_equal(memory, np.arange(float(LARGE))[::-1])


def test_results_may_change_places_with_their_inputs(comm: Communicator) -> None:
    a, b = np.full(LARGE, 1.0), np.full(LARGE, 2.0)
    comm.all_reduce_many([a, b], out=[b, a])
    assert (a[0], a[-1], b[0], b[-1]) == (2, 2, 1, 1)


def test_columns_of_one_matrix_may_take_the_results(comm: Communicator) -> None:
    matrix = np.zeros((LARGE, 3))
    columns = [matrix[:, column] for column in range(3)]
    comm.all_reduce_many([np.full(LARGE, float(at)) for at in range(3)], out=columns)
    assert matrix[[0, -1]].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("count", [2, LARGE])
def test_results_that_would_overwrite_each_other_are_refused(comm: Communicator, count: int) -> None:
    x, y = np.ones(count), np.ones(count)
    memory = np.zeros(2 * count)
    for out in (
        [y, y],
        [memory[:count], memory[count - 1 : -1]],
        [memory[::2], memory[1::-1] if count == 2 else memory[count:]],
    ):
        with pytest.raises(InvalidArgument, match=r"out\[0\] and out\[1\] share memory"):
            comm.all_reduce_many([x, y], out=out)
    assert memory.max() == 0
    assert comm.all_reduce_many([x, y], out=[memory[::2], memory[1::2]])[1][0] == 1


def test_results_that_would_overwrite_inputs_of_another_dtype_are_refused(comm: Communicator) -> None:
    memory = np.zeros(4 * LARGE, np.float32)
    floats, whole = memory[:LARGE], memory[LARGE : 2 * LARGE].view(np.int32)
    with pytest.raises(InvalidArgument, match=r"out\[0\] and tensors\[1\] share memory"):
        comm.all_reduce_many(
            [floats, whole], out=[whole.view(np.float32), memory[2 * LARGE : 3 * LARGE].view(np.int32)]
        )
    assert comm.all_reduce_many([floats, whole], out=[floats, whole])[1] is whole


@pytest.mark.parametrize(
    ("x", "overlaps"),
    [
        (np.zeros((3, 4)), False),
        (np.zeros((3, 4))[::-1, ::2], False),
        (np.zeros((1, 4))[:, ::2], False),
        (np.broadcast_to(np.zeros(1), (1, 1)), False),
        (np.broadcast_to(np.zeros(3), (2, 3)), True),
        (np.lib.stride_tricks.sliding_window_view(np.zeros(9), 3), True),
        (np.lib.stride_tricks.as_strided(np.zeros(9), (4,), (4,)), True),
    ],
)
def test_arrays_whose_elements_share_memory(x: npt.NDArray[np.float64], overlaps: bool) -> None:
    assert overlaps_itself(x) is overlaps


def test_an_out_whose_elements_share_memory_is_refused(comm: Communicator) -> None:
    for out in (
        np.broadcast_arrays(np.zeros(4), GRID.astype(float))[0],
        np.lib.stride_tricks.as_strided(np.zeros(6), (3, 4), (8, 8)),
    ):
        with pytest.raises(InvalidArgument, match="out has elements that share memory"):
            comm.all_reduce(GRID.astype(float), out=out)


def _frozen(of: Array) -> Array:
    copy = of.copy()
    copy.flags.writeable = False
    return copy
