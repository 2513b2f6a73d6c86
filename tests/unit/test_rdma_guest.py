"""The parts of the RDMA guest that need no guest: module order, the archive, what it runs, what it says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.rdma import resources
from tests.rdma.guest.initramfs import Archive
from tests.rdma.guest.kernel import load_order, parse_dependencies
from tests.rdma.guest.machine import Command, Console
from tests.rdma.guest.unavailable import Unavailable

DEPENDENCIES = """\
kernel/fs/9p/9p.ko.xz: kernel/net/9p/9pnet.ko.xz kernel/fs/netfs/netfs.ko.xz
kernel/net/9p/9pnet.ko.xz:
kernel/fs/netfs/netfs.ko.xz:
kernel/net/9p/9pnet_virtio.ko.xz: kernel/drivers/virtio/virtio.ko kernel/net/9p/9pnet.ko.xz
kernel/drivers/virtio/virtio.ko:
"""


def test_a_module_is_loaded_after_those_that_it_needs_and_once() -> None:
    order = load_order(["9pnet_virtio", "9p", "overlay"], parse_dependencies(DEPENDENCIES), {"overlay"})
    assert [path.rpartition("/")[2] for path in order] == [
        "9pnet.ko.xz",
        "virtio.ko",
        "9pnet_virtio.ko.xz",
        "netfs.ko.xz",
        "9p.ko.xz",
    ]


def test_a_kernel_without_a_module_is_no_kernel_for_the_guest() -> None:
    with pytest.raises(Unavailable, match="no module rdma_rxe"):
        load_order(["rdma_rxe"], parse_dependencies(DEPENDENCIES), set())


def test_the_archive_is_laid_out_as_the_kernel_reads_it() -> None:
    archive = Archive()
    archive.folder("bin")
    archive.file("bin/busybox", b"12345")
    data = archive.finished()
    assert len(data) % 4 == 0
    assert data.startswith(b"070701" + b"00000001" + b"000041ed")
    at = data.index(b"bin/busybox\0")
    assert (at - data.rindex(b"070701", 0, at)) == 110
    assert b"12345\0\0\0" + b"070701" in data
    assert data.count(b"070701") == 3
    assert b"TRAILER!!!\0" in data


def test_a_command_is_quoted_bounded_and_has_its_variables() -> None:
    script = Command(["echo", "it's"], Path("/a b"), 7.5, {"X": "1 2"}, nodes=0).script(Path("/path"))
    assert "export X='1 2'\n" in script
    assert "export PYTHONPATH=/path\n" in script
    assert script.endswith("cd '/a b'\nexec timeout -k 5 7.5 echo 'it'\"'\"'s'\n")
    assert "device.sh" not in script
    assert "device.sh" in Command(["true"], Path("/"), 1.0, {}).script(Path("/path"))


def follow(console: str, written: list[bytes]) -> int:
    with subprocess.Popen(["printf", "%s", console], stdout=subprocess.PIPE) as process:
        return Console(process, written.append).follow(30.0)


def test_the_console_gives_the_output_and_the_status() -> None:
    written: list[bytes] = []
    assert follow("kernel\r\n[1] noise GUEST-UP\r\none\r\ntwo\r\nGUEST-STATUS 3\r\nmore\r\n", written) == 3
    assert b"".join(written) == b"one\ntwo\n"


def test_output_without_an_end_of_line_does_not_hide_the_status() -> None:
    written: list[bytes] = []
    assert follow("GUEST-UP\n...GUEST-STATUS 0\n", written) == 0
    assert b"".join(written) == b"..."


def test_a_guest_that_dies_is_no_success() -> None:
    assert follow("GUEST-UP\nKernel panic\n", []) == 125


def test_a_guest_that_does_not_come_up_says_why() -> None:
    with pytest.raises(Unavailable, match="insmod 9p"):
        follow("booting\nGUEST-FAILED insmod 9p\n", [])
    with pytest.raises(Unavailable, match="no such image"):
        follow("qemu: no such image\n", [])


def test_what_is_held_beyond_what_was_held_before() -> None:
    before = resources.parse('[{"ifindex":0,"ifname":"rxe0","pd":1,"cq":1,"qp":1,"cm_id":0,"mr":0,"ctx":0,"srq":0}]')
    after = resources.parse('[{"ifname":"rxe0","pd":1,"cq":0,"qp":3,"mr":1},{"ifname":"rxe1","pd":1}]')
    assert resources.surplus(before, after) == {"rxe0 qp": 2, "rxe0 mr": 1, "rxe1 pd": 1}
    assert resources.surplus(before, before) == {}
