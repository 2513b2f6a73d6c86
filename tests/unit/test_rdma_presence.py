"""Whether a device is still offered by the kernel, on a tree of files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from allreduced.transports.rdma import host, presence
from allreduced.transports.rdma.presence import Presence


def offer(files: Path, entry: str, device: str) -> None:
    """Let the kernel offer a device."""
    (files / entry).mkdir(parents=True)
    (files / entry / "ibdev").write_text(f"{device}\n")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the kernel's entries, with one of another device."""
    monkeypatch.setattr(presence, "offered", lambda: host.offered(tmp_path))
    (tmp_path / "abi_version").write_text("6\n")
    offer(tmp_path, "uverbs0", "mlx5_0")
    return tmp_path


def test_a_device_is_there_until_its_entry_is_gone(files: Path) -> None:
    offer(files, "uverbs1", "rxe0")
    here = Presence("rxe0")
    assert not here.is_over()
    (files / "uverbs0" / "ibdev").unlink()
    (files / "uverbs0").rmdir()
    assert not here.is_over()
    (files / "uverbs1").rename(files / "gone")
    assert here.is_over()


def test_another_device_with_the_entry_of_one_that_is_gone_is_another(files: Path) -> None:
    offer(files, "uverbs1", "rxe0")
    here = Presence("rxe0")
    (files / "uverbs1").rename(files / "gone")
    offer(files, "uverbs1", "rxe0")
    assert here.is_over()
    assert not Presence("rxe0").is_over()


def test_where_the_kernel_tells_nothing_of_a_device_it_is_held_to_be_there(files: Path) -> None:
    here = Presence("rxe0")
    assert not here.is_over()
    offer(files, "uverbs1", "rxe0")
    assert not here.is_over()
