"""What stands in the way of RDMA on a machine is found at start, and each finding says what mends it."""

from __future__ import annotations

import importlib
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.other_user import STRANGER, as_user, only_root

from allreduced.transports.rdma.checks import Finding, Needs, findings
from allreduced.transports.rdma.host import (
    HostDevice,
    HostFacts,
    binding,
    device_names,
    host_devices,
    may_lock_all,
    memlock_limit,
)
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.verbs_port import DeviceInfo, PortInfo
from allreduced.transports.rdma.wire import HEADER

GIB = 1 << 30
NEEDS = Needs(arenas=4 * GIB, tile=2 << 20, flows=2, options=RdmaOptions(), peers=3)
LEAST = 3 * (2 * (128 + 32) * (8192 + HEADER) + 2 * 2 * (2 << 20))
PORT = PortInfo(1, "active", "ethernet", 4096, GIB, 0, ())
GOOD = DeviceInfo("mlx5_0", (PORT,), 1 << 17, 1 << 15, 1 << 22, 1 << 24, 1 << 63)
HOST = HostFacts((HostDevice("mlx5_0", "/dev/infiniband/uverbs0", "allowed"),), "found", None)


def found(host: HostFacts = HOST, *devices: DeviceInfo, needs: Needs = NEEDS) -> tuple[Finding, ...]:
    return findings(host, devices or (GOOD,), needs)


def only(host: HostFacts = HOST, *devices: DeviceInfo, needs: Needs = NEEDS) -> Finding:
    [one] = found(host, *devices, needs=needs)
    return one


def named(device: str) -> Needs:
    return replace(NEEDS, options=RdmaOptions(device=device))


def test_a_machine_that_has_everything_has_no_findings() -> None:
    assert found() == ()
    assert found(replace(HOST, memlock=13 * GIB)) == ()


# Devices and their files


def test_no_device_is_a_finding_of_its_own() -> None:
    one = only(HostFacts((), "missing", 8 << 20))
    assert (one.subject, one.serious, one.message) == ("absent", True, "this machine has no RDMA device")


def test_a_named_device_that_is_not_there_lists_those_that_are() -> None:
    one = only(needs=named("mlx5_7"))
    assert (one.subject, one.serious) == ("device", True)
    assert one.message == "there is no RDMA device 'mlx5_7'; there are: mlx5_0"


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (
            HostDevice("mlx5_0", "/dev/infiniband/uverbs0", "denied"),
            "this user may not read and write /dev/infiniband/uverbs0, the file of the RDMA device mlx5_0",
        ),
        (
            HostDevice("mlx5_0", "/dev/infiniband/uverbs0", "missing"),
            "/dev/infiniband/uverbs0, the file of the RDMA device mlx5_0, is not here",
        ),
        (HostDevice("mlx5_0", "", "missing"), "the kernel offers no file for the RDMA device mlx5_0"),
    ],
)
def test_a_device_whose_file_cannot_be_used_says_so_and_how_to_mend_it(device: HostDevice, message: str) -> None:
    one = only(replace(HOST, devices=(device,)))
    assert (one.subject, one.serious, one.message) == ("device_file", True, message)
    assert "--device /dev/infiniband" in one.hint
    assert "modprobe ib_uverbs" in one.hint
    # Another device that can be used makes it less serious, unless this one is named.
    both = replace(HOST, devices=(device, HostDevice("mlx5_1", "/dev/infiniband/uverbs1", "allowed")))
    assert [one.serious for one in found(both)] == [False]
    assert [one.serious for one in found(both, needs=named("mlx5_0"))] == [True]
    assert found(both, replace(GOOD, name="mlx5_1"), needs=named("mlx5_1")) == ()


def test_pyverbs_that_is_missing_or_unknown_says_where_to_get_it() -> None:
    one = only(replace(HOST, binding="missing"))
    assert (one.subject, one.serious) == ("binding", True)
    assert one.message == "pyverbs is not installed for the Python that runs this agent"
    assert "apt install python3-pyverbs" in one.hint
    one = only(replace(HOST, binding="unknown"))
    assert one.message == "pyverbs is installed, but of a version that is not known here (rdma-core 44 to 59 are)"


# Locked memory


def test_too_little_locked_memory_names_both_numbers_and_every_command() -> None:
    assert NEEDS.least == LEAST
    one = only(replace(HOST, memlock=8 << 20))
    assert (one.subject, one.serious) == ("memlock", True)
    assert one.message == "this process may lock 8 MiB of memory, and its links lock 31.5 MiB at least"
    for command in ("LimitMEMLOCK=infinity", "ulimit -l unlimited", "limits.d/rdma.conf", "--ulimit memlock=-1"):
        assert command in one.hint
    assert only(replace(HOST, memlock=LEAST - 1)).serious
    assert replace(NEEDS, peers=0).least == replace(NEEDS, peers=1).least == LEAST // 3


def test_locked_memory_that_does_not_reach_for_all_peers_is_told() -> None:
    one = only(replace(HOST, memlock=LEAST))
    assert (one.subject, one.serious) == ("memlock", False)
    assert one.message == (
        "this process may lock 31.5 MiB of memory, and its links may come to 12 GiB: what cannot be locked is copied"
        " into messages"
    )
    assert one.hint.endswith("or lower limits.arena_bytes")
    assert only(replace(HOST, memlock=LEAST + 12 * GIB - 1)).subject == "memlock"
    assert found(replace(HOST, memlock=LEAST + 12 * GIB)) == ()


def test_several_findings_come_with_the_serious_first() -> None:
    both = replace(
        HOST,
        devices=(HostDevice("mlx4_0", "", "missing"), *HOST.devices),
        binding="missing",
        memlock=1 << 20,
    )
    assert [(one.subject, one.serious) for one in found(both)] == [
        ("binding", True),
        ("memlock", True),
        ("device_file", False),
    ]


def test_root_of_the_first_namespace_with_the_capability_locks_what_it_wants() -> None:
    whole, part = "         0          0 4294967295\n", "         0       1000          1\n"
    every = "Name:\tagent\nCapEff:\t000001ffffffffff\n"
    docker = "Name:\tagent\nCapEff:\t00000000a80425fb\n"  # what a container of root has by default
    assert may_lock_all(every, whole)
    assert not may_lock_all(every, part)  # rootless: the kernel asks for the capability outside
    assert not may_lock_all(docker, whole)
    assert not may_lock_all("", whole)
    assert not may_lock_all(every, "")


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = memlock_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert (soft, hard) == (before[1], before[1])
    assert limit is None or limit == hard


# What the devices say


@pytest.mark.parametrize(
    ("device", "subject", "serious", "message"),
    [
        (
            DeviceInfo("mlx5_0", (), problem="Failed to open device"),
            "device",
            True,
            "the RDMA device mlx5_0 cannot be opened: Failed to open device",
        ),
        (
            replace(GOOD, max_queue_pairs=1),
            "limits",
            True,
            "the RDMA device mlx5_0 has 1 queue pairs, and one link takes 2 (peers.flows)",
        ),
        (
            replace(GOOD, max_queue_pairs=5),
            "limits",
            False,
            "the RDMA device mlx5_0 has 5 queue pairs, and links to 3 peers take 6",
        ),
        (
            replace(GOOD, max_work_requests=64),
            "limits",
            True,
            "the RDMA device mlx5_0 takes 64 requests in a queue, and a link needs 128",
        ),
        (
            replace(GOOD, max_completions=100),
            "limits",
            True,
            "the RDMA device mlx5_0 has completion queues of 100 entries, and a link needs 258",
        ),
        (
            replace(GOOD, max_regions=100),
            "limits",
            False,
            "the RDMA device mlx5_0 has 100 memory regions: what cannot have one is copied into messages",
        ),
        (
            replace(GOOD, max_region_size=2 * GIB),
            "limits",
            False,
            "the RDMA device mlx5_0 registers at most 2 GiB at once: larger parts of tensors are copied into messages",
        ),
        (
            replace(GOOD, ports=(replace(PORT, state="down"),)),
            "port",
            False,  # it may come up later
            "no RDMA port is active: mlx5_0 port 1 is down",
        ),
    ],
)
def test_what_a_device_lacks(device: DeviceInfo, subject: str, serious: bool, message: str) -> None:
    one = only(HOST, device)
    assert (one.subject, one.serious, one.message) == (subject, serious, message)
    assert one.hint


def test_a_device_that_lacks_something_is_not_serious_beside_a_good_one() -> None:
    bad = replace(GOOD, name="mlx4_0", max_work_requests=64)
    shut = DeviceInfo("mlx4_1", (), problem="Failed to open device")
    assert [(one.subject, one.serious) for one in found(HOST, bad, shut, GOOD)] == [
        ("device", False),
        ("limits", False),
    ]


def test_devices_that_were_not_asked_have_no_findings() -> None:
    assert findings(HOST, None, NEEDS) == ()


# What the kernel tells


def test_devices_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    names, files, place = tmp_path / "infiniband", tmp_path / "infiniband_verbs", tmp_path / "dev"
    for name in ("rxe0", "mlx5_0", "mlx5_1", "mlx5_2"):
        (names / name).mkdir(parents=True)
    for number, name in enumerate(("mlx5_0", "mlx5_1", "rxe0")):
        (files / f"uverbs{number}").mkdir(parents=True)
        (files / f"uverbs{number}" / "ibdev").write_text(f"{name}\n")
    (files / "abi_version").write_text("6\n")
    place.mkdir()
    for number in (0, 2):
        (place / f"uverbs{number}").touch()
    assert device_names(names) == ("mlx5_0", "mlx5_1", "mlx5_2", "rxe0")
    assert host_devices(names, files, place, lambda file: file.name != "uverbs2") == (
        HostDevice("mlx5_0", str(place / "uverbs0"), "allowed"),
        HostDevice("mlx5_1", str(place / "uverbs1"), "missing"),
        HostDevice("mlx5_2", "", "missing"),
        HostDevice("rxe0", str(place / "uverbs2"), "denied"),
    )
    assert device_names(tmp_path / "nothing") == ()
    assert host_devices(tmp_path / "nothing") == ()


@only_root
def test_a_folder_that_this_user_may_not_enter_denies_its_devices(open_folder: Path) -> None:
    (open_folder / "names" / "mlx5_0").mkdir(parents=True)
    entry = open_folder / "files" / "uverbs0"
    entry.mkdir(parents=True)
    (entry / "ibdev").write_text("mlx5_0\n")
    place = open_folder / "infiniband"
    place.mkdir(0o700)
    (place / "uverbs0").touch()
    with as_user(STRANGER):
        found = host_devices(open_folder / "names", open_folder / "files", place)
    assert found == (HostDevice("mlx5_0", str(place / "uverbs0"), "denied"),)


def test_pyverbs_is_looked_for_without_being_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pyverbs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "device.py").write_text("raise RuntimeError('loaded')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pyverbs", raising=False)
    assert binding() == "unknown"
    (package / "enums.py").write_text("raise RuntimeError('loaded')\n")
    monkeypatch.delitem(sys.modules, "pyverbs", raising=False)
    importlib.invalidate_caches()
    assert binding() == "found"
    monkeypatch.delitem(sys.modules, "pyverbs", raising=False)
