from __future__ import annotations

import array
import types

import numpy as np
import pytest

from allreduced.client.arrays import in_kind, read_tensor
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
        (b"abc", "uint8"),
        ("abc", "a str, which is no tensor"),
        (None, "a NoneType"),
        (3.5, "a float"),
        (np.zeros(3, ">i4"), "byte order"),
        (np.zeros(3, "datetime64[s]"), "datetime64"),
        (np.array([{}]), "object"),
        (np.zeros(2, np.float16), "float16"),
        (np.zeros(2, [("a", "f4")]), "is not supported"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "a mask cannot be reduced"),
    ],
)
def test_what_is_not(value: object, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        read_tensor(value)


class FakeTensor:
    """What is used of a torch tensor."""

    def __init__(self, of: np.ndarray, *, device: str = "cpu", dtype: str | None = None) -> None:
        self.of = of
        self.device = types.SimpleNamespace(type=device)
        self.dtype = f"torch.{dtype or of.dtype.name}"

    def detach(self) -> FakeTensor:
        return self

    def numpy(self) -> np.ndarray:
        return self.of


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(Tensor=FakeTensor, from_numpy=FakeTensor)
    monkeypatch.setitem(__import__("sys").modules, "torch", module)


@pytest.mark.usefixtures("torch")
def test_tensors_of_torch_come_back_as_such() -> None:
    x = np.arange(3.0)
    tensor = read_tensor(FakeTensor(x))
    assert tensor.array is x
    assert tensor.torch
    back = in_kind(x, torch=True)
    assert isinstance(back, FakeTensor)
    assert back.of is x
    assert in_kind(x, torch=False) is x


@pytest.mark.usefixtures("torch")
def test_tensors_of_torch_that_cannot_be_taken() -> None:
    with pytest.raises(InvalidArgument, match="device 'cuda'"):
        read_tensor(FakeTensor(np.zeros(1), device="cuda"))
    with pytest.raises(InvalidArgument, match="bfloat16"):
        read_tensor(FakeTensor(np.zeros(1), dtype="bfloat16"))
