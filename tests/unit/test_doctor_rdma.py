"""What the doctor says about RDMA: what stands in its way, and what there is."""

from __future__ import annotations

from ipaddress import IPv6Address

import pytest

from allreduced.daemon.doctor.finding import Level
from allreduced.daemon.doctor.rdma import RdmaFacts, judge_rdma
from allreduced.daemon.rdma_use import Examined
from allreduced.transports.rdma.checks import Finding
from allreduced.transports.rdma.verbs_port import DeviceInfo, GidEntry, PortInfo

DEVICE = DeviceInfo(
    "mlx5_0",
    (
        PortInfo(
            1,
            "active",
            "ethernet",
            4096,
            1 << 30,
            0,
            (
                GidEntry(0, IPv6Address("fe80::1").packed, "roce_v2", "eth0"),
                GidEntry(3, IPv6Address("::ffff:192.0.2.7").packed, "roce_v1"),
            ),
        ),
        PortInfo(2, "down", "infiniband", 2048, 1 << 30, 9, ()),
    ),
)
GIDS = "0 fe80::1 (RoCE v2, eth0); 3 192.0.2.7 (RoCE v1)"
ABSENT = Finding("absent", True, "this machine has no RDMA device", "see `rdma link`")
MEMLOCK = Finding("memlock", False, "this process may lock 8 MiB of memory, …", "LimitMEMLOCK=infinity")
SHUT = Finding("device_file", True, "this user may not read and write /dev/infiniband/uverbs0", "udev")


def told(facts: RdmaFacts) -> list[tuple[str, Level, str, str]]:
    return [(one.subject, one.level, one.message, one.mend) for one in judge_rdma(facts)]


def test_devices_ports_and_gids_are_listed_where_all_is_well() -> None:
    assert told(RdmaFacts("auto", ("mlx5_0",), None, Examined((), (DEVICE,)))) == [
        ("memlock", Level.OK, "this process may lock any amount of memory", ""),
        ("RDMA", Level.OK, "devices, their files, pyverbs and the limits are as they should be", ""),
        (
            "RDMA",
            Level.OK,
            f"mlx5_0 port 1: active, link layer ethernet, MTU 4096; GIDs: {GIDS}",
            "",
        ),
        ("RDMA", Level.OK, "mlx5_0 port 2: down, link layer infiniband, MTU 2048; GIDs: none", ""),
    ]


def test_memory_that_may_be_locked_is_told_once() -> None:
    enough = told(RdmaFacts("rdma", ("mlx5_0",), 512 << 20, Examined(())))
    assert enough[0] == ("memlock", Level.OK, "this process may lock 512 MiB of memory", "")
    little = told(RdmaFacts("rdma", ("mlx5_0",), 8 << 20, Examined((MEMLOCK,), (DEVICE,))))
    assert [one for one in little if one[0] == "memlock"] == [
        ("memlock", Level.WARNING, MEMLOCK.message, "LimitMEMLOCK=infinity")
    ]
    assert len(little) == 3  # it, and the two ports


@pytest.mark.parametrize(("transport", "level"), [("auto", Level.WARNING), ("rdma", Level.PROBLEM)])
def test_what_stands_in_the_way_is_as_bad_as_rdma_is_wanted(transport: str, level: Level) -> None:
    assert told(RdmaFacts(transport, ("mlx5_0",), None, Examined((SHUT,)))) == [
        ("RDMA", level, SHUT.message, "udev"),
        ("memlock", Level.OK, "this process may lock any amount of memory", ""),
    ]


def test_no_device_is_worth_a_note_only_unless_rdma_is_asked_for() -> None:
    assert told(RdmaFacts("auto", (), 1 << 20, Examined((ABSENT,)))) == [("RDMA", Level.NOTE, ABSENT.message, "")]
    assert told(RdmaFacts("rdma", (), 1 << 20, Examined((ABSENT,)))) == [
        ("RDMA", Level.PROBLEM, ABSENT.message, ABSENT.hint)
    ]


def test_devices_that_the_settings_leave_alone_are_named() -> None:
    ((subject, level, message, mend),) = told(RdmaFacts("tcp", ("mlx5_0", "mlx5_1"), None, None))
    assert (subject, level) == ("RDMA", Level.NOTE)
    assert "(mlx5_0, mlx5_1)" in message
    assert mend.startswith("set peers.transport to auto")
    assert told(RdmaFacts("tcp", (), None, None)) == [
        ("RDMA", Level.NOTE, "peers.transport is tcp, and this machine has no RDMA device", "")
    ]
