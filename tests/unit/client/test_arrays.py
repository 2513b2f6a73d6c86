from __future__ import annotations

import array
import types

import ml_dtypes
import numpy as np
import pytest

from allreduced.client.arrays import Kind, in_kind, read_out, read_tensor
from allreduced.core.dtypes import DType
from allreduced.core.errors import InvalidArgument


class Interface:
    def __init__(self, of: np.ndarray) -> None:
        self.of = of

    @property
    def __array_interface__(self) -> dict[str, object]:
        return self.of.__array_interface__


class Capsule:
    def __init__(self, of: np.ndarray, device: int = 1) -> None:
        self.of = of
        self.device = device

    def __dlpack__(self, *, stream: None = None) -> object:
        return self.of.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(4, dtype=np.int32),
        Interface(np.arange(4, dtype=np.int32)),
        Capsule(np.arange(4, dtype=np.int32)),
        np.arange(4, dtype=np.int32).data,
        array.array("i", [0, 1, 2, 3]),
    ],
    ids=["numpy", "array interface", "dlpack", "memoryview", "array"],
)
def test_what_is_a_tensor(value: object) -> None:
    tensor = read_tensor(value)
    assert tensor.array.tolist() == [0, 1, 2, 3]
    assert tensor.dtype is DType.INT32
    assert tensor.nbytes == 16


def test_bytes_are_a_tensor_that_takes_no_result() -> None:
    tensor = read_tensor(b"abc")
    assert (tensor.dtype, tensor.array.tolist()) == (DType.UINT8, [97, 98, 99])
    with pytest.raises(InvalidArgument, match="out is read-only"):
        read_out(b"abc", tensor)


def test_memory_is_shared_and_layout_is_kept() -> None:
    base = np.zeros((4, 6))
    tensor = read_tensor(base.T[::2])
    base[0, 2] = 7
    assert tensor.array[1, 0] == 7
    assert read_tensor(np.float32(2)).array.shape == ()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Capsule(np.zeros(1), device=2), "not in the memory of the CPU"),
        ("abc", "a str, which is no tensor"),
        (None, "a NoneType"),
        (3.5, "a float"),
        (np.zeros(3, ">i4"), "byte order"),
        (np.zeros(3, "datetime64[s]"), "datetime64"),
        (np.array([{}]), "object"),
        (np.zeros(2, np.longdouble), "longdouble|float128"),
        (np.zeros(2, ml_dtypes.float8_e5m2), "float8_e5m2"),
        (np.zeros(2, ">c16"), "byte order"),
        (np.zeros(2, [("a", "f4")]), "is not supported"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "a mask cannot be reduced"),
    ],
)
def test_what_is_not(value: object, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        read_tensor(value)


class FakeTensor:
    """What is used of a torch tensor."""

    def __init__(
        self, of: np.ndarray, *, device: str = "cpu", dtype: str | None = None, offset: int = 0, room: int | None = None
    ) -> None:
        self.of = of
        self.offset = offset
        self.room = room
        self.device = types.SimpleNamespace(type=device)
        self.dtype = f"torch.{dtype or of.dtype.name}"

    def detach(self) -> FakeTensor:
        return self

    def storage_offset(self) -> int:
        return self.offset

    def untyped_storage(self) -> FakeTensor:
        return self

    def nbytes(self) -> int:
        return self.of.nbytes if self.room is None else self.room

    def numpy(self) -> np.ndarray:
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.of

    def view(self, dtype: str) -> FakeTensor:
        name = dtype.removeprefix("torch.")
        return FakeTensor(self.of.view("int16"), dtype=name)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(
        Tensor=FakeTensor, from_numpy=FakeTensor, int16="torch.int16", bfloat16="torch.bfloat16"
    )
    monkeypatch.setitem(__import__("sys").modules, "torch", module)


@pytest.mark.usefixtures("torch")
def test_tensors_of_torch_come_back_as_such() -> None:
    x = np.arange(3.0)
    tensor = read_tensor(FakeTensor(x))
    assert tensor.array is x
    assert tensor.kind == Kind(torch=True)
    back = in_kind(x, DType.FLOAT64, tensor.kind)
    assert isinstance(back, FakeTensor)
    assert back.of is x
    assert in_kind(x, DType.FLOAT64, Kind(torch=False)) is x


@pytest.mark.usefixtures("torch")
def test_bfloat16_of_torch_is_its_bits_and_comes_back_as_such() -> None:
    memory = np.array([0x3F80, 0x7FC0], np.uint16)
    tensor = read_tensor(FakeTensor(memory, dtype="bfloat16"))
    assert tensor.dtype is DType.BFLOAT16
    assert tensor.array.dtype == np.uint16
    assert np.shares_memory(tensor.array, memory)
    back = in_kind(tensor.array, tensor.dtype, tensor.kind)
    assert isinstance(back, FakeTensor)
    assert back.dtype == "torch.bfloat16"
    assert np.shares_memory(back.of, memory)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_bfloat16_of_ml_dtypes_is_its_bits_and_comes_back_as_such(shape: tuple[int, ...]) -> None:
    x = np.asfortranarray(np.full(shape, 1.5, ml_dtypes.bfloat16))
    tensor = read_tensor(x)
    assert tensor.dtype is DType.BFLOAT16
    assert tensor.nbytes == x.nbytes
    assert tensor.array.dtype == np.uint16
    assert tensor.array.strides == x.strides
    assert not x.size or np.shares_memory(tensor.array, x)
    back = in_kind(tensor.array, tensor.dtype, tensor.kind)
    assert isinstance(back, np.ndarray)
    assert back.dtype == ml_dtypes.bfloat16
    assert back.tobytes() == x.tobytes()


def test_uint16_is_no_out_for_bfloat16() -> None:
    x = np.zeros(3, ml_dtypes.bfloat16)
    with pytest.raises(InvalidArgument, match="out has dtype uint16, the result has bfloat16"):
        read_out(np.zeros(3, np.uint16), read_tensor(x))
    assert np.shares_memory(read_out(x, read_tensor(x)), x)


@pytest.mark.parametrize("dtype", DType)
def test_every_dtype_of_the_table_is_read(dtype: DType) -> None:
    x = np.zeros(3, ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else dtype.label)
    tensor = read_tensor(x)
    assert tensor.dtype is dtype
    assert tensor.array.dtype == dtype.storage


@pytest.mark.usefixtures("torch")
def test_tensors_of_torch_that_cannot_be_taken() -> None:
    with pytest.raises(InvalidArgument, match="device 'cuda'"):
        read_tensor(FakeTensor(np.zeros(1), device="cuda"))
    with pytest.raises(InvalidArgument, match="float8_e4m3fn"):
        read_tensor(FakeTensor(np.zeros(1), dtype="float8_e4m3fn"))
    for freed in (FakeTensor(np.zeros(3), room=0), FakeTensor(np.zeros(6)[::2], room=48, offset=2)):
        with pytest.raises(InvalidArgument, match="storage was freed, or is too small"):
            read_tensor(freed)
    read_tensor(FakeTensor(np.zeros(6)[::2], room=48, offset=1))
