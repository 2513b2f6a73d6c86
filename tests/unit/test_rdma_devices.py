"""Which device, port and GID a link uses: by the address through which the peer is reached, or by name."""

from __future__ import annotations

import ipaddress
from dataclasses import replace

import pytest

from allreduced.core.errors import ConfigError
from allreduced.transports.rdma.devices import agree, choose, gid_of, gid_text, is_link_local, path_text
from allreduced.transports.rdma.interfaces import gid_of_hardware, interface_of, interface_of_ipv6, port_gid
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.verbs_port import DeviceInfo, GidEntry, LocalPort, PortInfo

MAC_GID = ipaddress.IPv6Address("fe80::1234:56ff:fe78:9abc").packed
V4 = gid_of("10.0.0.1")
V6 = gid_of("2001:db8::1")
PORT_GID = bytes.fromhex("fe80000000000000b8599f0300ab12cd")


def roce(*entries: GidEntry, number: int = 1, mtu: int = 1024) -> PortInfo:
    return PortInfo(number, "active", "ethernet", mtu, 1 << 30, 0, entries)


def usual(interface: str = "eth0", v4: str = "10.0.0.1", v6: str = "2001:db8::1") -> tuple[GidEntry, ...]:
    """Return the table that Linux makes: of each address a RoCE v1 entry and a v2 entry, and empty ones behind."""
    return (
        GidEntry(0, MAC_GID, "roce_v1", interface),
        GidEntry(1, MAC_GID, "roce_v2", interface),
        GidEntry(2, gid_of(v4), "roce_v1", interface),
        GidEntry(3, gid_of(v4), "roce_v2", interface),
        GidEntry(4, gid_of(v6), "roce_v1", interface),
        GidEntry(5, gid_of(v6), "roce_v2", interface),
        GidEntry(6, bytes(16), "ib"),
    )


MLX0 = DeviceInfo("mlx5_0", (roce(*usual()),))
MLX1 = DeviceInfo("mlx5_1", (roce(*usual("eth1", "10.1.0.1", "2001:db8:1::1"), mtu=4096),))
IB = DeviceInfo("ib0", (PortInfo(1, "active", "infiniband", 4096, 1 << 30, 17, (GidEntry(0, PORT_GID, "ib"),)),))


def refusal(*devices: DeviceInfo, host: str = "10.0.0.9", port_gid: bytes = b"", **options: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        choose(devices, RdmaOptions(**options), host, port_gid)  # type: ignore[arg-type] # each test gives its own
    return caught.value


# By address


@pytest.mark.parametrize(
    ("host", "device", "index", "mtu"),
    [
        ("10.0.0.1", "mlx5_0", 3, 1024),
        ("::ffff:10.0.0.1", "mlx5_0", 3, 1024),
        ("2001:db8::1", "mlx5_0", 5, 1024),
        ("2001:0db8:0:0::1", "mlx5_0", 5, 1024),
        ("10.1.0.1", "mlx5_1", 3, 4096),
        ("2001:db8:1::1", "mlx5_1", 5, 4096),
    ],
)
def test_the_gid_is_the_address_through_which_the_peer_is_reached(host: str, device: str, index: int, mtu: int) -> None:
    chosen = choose([MLX0, MLX1, IB], RdmaOptions(), host)
    assert (chosen.device, chosen.port, chosen.gid.index, chosen.gid.kind) == (device, 1, index, "roce_v2")
    assert (chosen.link_layer, chosen.mtu, chosen.max_message) == ("ethernet", mtu, 1 << 30)
    assert chosen.gid.gid == gid_of(host)


def test_roce_v1_is_taken_where_the_address_has_nothing_better() -> None:
    old = DeviceInfo("mlx4_0", (roce(GidEntry(0, MAC_GID, "roce_v1"), GidEntry(1, V4, "roce_v1")),))
    assert choose([old], RdmaOptions(), "10.0.0.1").gid == GidEntry(1, V4, "roce_v1")
    assert choose([old, MLX0], RdmaOptions(), "10.0.0.1").device == "mlx5_0"


def test_a_port_that_is_up_comes_before_one_with_the_same_address_that_is_not() -> None:
    down = replace(MLX0, name="mlx5_9", ports=(replace(MLX0.ports[0], state="down"),))
    assert choose([down, MLX0], RdmaOptions(), "10.0.0.1").device == "mlx5_0"
    assert refusal(down, host="10.0.0.1").message == "mlx5_9 port 1 is down, not active"


def test_a_second_port_is_found() -> None:
    two = DeviceInfo("mlx5_0", (roce(*usual()), roce(*usual("eth1", "10.9.0.1", "2001:db8:9::1"), number=2)))
    chosen = choose([two], RdmaOptions(), "10.9.0.1")
    assert (chosen.port, chosen.gid.interface) == (2, "eth1")
    assert choose([two], RdmaOptions(port=2), "2001:db8:9::1").gid.index == 5


def test_an_infiniband_port_is_found_by_the_interface_above_it() -> None:
    chosen = choose([MLX0, IB], RdmaOptions(), "192.168.3.1", PORT_GID)
    assert (chosen.device, chosen.link_layer, chosen.lid, chosen.gid) == ("ib0", "infiniband", 17, IB.ports[0].gids[0])
    assert chosen.mtu == 4096


def test_an_address_that_no_gid_matches_lists_those_that_there_are() -> None:
    error = refusal(MLX0, IB)
    assert error.message == (
        "no GID of an RDMA device here is 10.0.0.9, the address through which the peer is reached; there are:"
        " mlx5_0 port 1 GID 0 fe80::1234:56ff:fe78:9abc (RoCE v1, eth0, link-local),"
        " mlx5_0 port 1 GID 1 fe80::1234:56ff:fe78:9abc (RoCE v2, eth0, link-local),"
        " mlx5_0 port 1 GID 2 10.0.0.1 (RoCE v1, eth0),"
        " mlx5_0 port 1 GID 3 10.0.0.1 (RoCE v2, eth0),"
        " mlx5_0 port 1 GID 4 2001:db8::1 (RoCE v1, eth0),"
        " mlx5_0 port 1 GID 5 2001:db8::1 (RoCE v2, eth0),"
        " ib0 port 1 GID 0 fe80::b859:9f03:ab:12cd (InfiniBand, link-local)"
    )
    assert "rdma.device and rdma.gid_index" in error.hint
    many = DeviceInfo("mlx5_0", (roce(*(GidEntry(n, gid_of(f"10.0.1.{n}"), "roce_v2") for n in range(1, 21))),))
    assert refusal(many).message.endswith("mlx5_0 port 1 GID 8 10.0.1.8 (RoCE v2), and 12 more")
    assert refusal(DeviceInfo("mlx5_0", (roce(),))).message.endswith("there are: none")


def test_loopback_is_no_address_of_a_device() -> None:
    assert "is 127.0.0.1, the address through which" in refusal(MLX0, host="127.0.0.1").message
    assert "is ::1, the address through which" in refusal(MLX0, host="::1").message


def test_link_local_entries_are_taken_only_when_they_are_asked_for() -> None:
    host = "fe80::1234:56ff:fe78:9abc%eth0"
    assert "no GID of an RDMA device" in refusal(MLX0, host=host).message
    assert choose([MLX0], RdmaOptions(device="mlx5_0"), host).gid.index == 1
    assert choose([MLX0, MLX1], RdmaOptions(device="mlx5_1", gid_index=1), "10.1.0.1").gid.gid == MAC_GID


# By name


def test_a_named_device_beats_the_one_that_the_address_would_choose() -> None:
    one = DeviceInfo("mlx5_7", (roce(GidEntry(0, MAC_GID, "roce_v2"), GidEntry(1, gid_of("10.7.0.1"), "roce_v2")),))
    chosen = choose([MLX0, one, IB], RdmaOptions(device="mlx5_7"), "10.0.0.1")
    assert (chosen.device, chosen.gid.index) == ("mlx5_7", 1)
    assert choose([MLX0, IB], RdmaOptions(device="ib0"), "10.0.0.1").gid.gid == PORT_GID


def test_which_gid_of_a_named_device_must_be_told_where_several_could_be_meant() -> None:
    error = refusal(MLX0, host="10.9.9.9", device="mlx5_0")
    assert error.message.startswith(
        "no GID of mlx5_0 is 10.9.9.9, the address through which the peer is reached, and which of these is meant"
        " cannot be told: mlx5_0 port 1 GID 0"
    )
    assert (error.path, error.hint) == ("rdma.gid_index", "set rdma.gid_index")
    assert choose([MLX0], RdmaOptions(device="mlx5_0", gid_index=3), "10.9.9.9").gid.gid == V4


def test_an_index_finds_its_port() -> None:
    assert choose([MLX0], RdmaOptions(gid_index=4), "10.9.9.9").gid == GidEntry(4, V6, "roce_v1", "eth0")
    assert choose([MLX0, MLX1], RdmaOptions(gid_index=5), "10.1.0.1").device == "mlx5_1"
    error = refusal(MLX0, MLX1, host="10.9.9.9", gid_index=5)
    assert error.message == ("rdma.gid_index is 5, and several ports have such an entry: mlx5_0 port 1, mlx5_1 port 1")
    assert error.hint == "name one with rdma.device and rdma.port"
    for index in (6, 7):  # an empty entry, and none
        error = refusal(MLX0, gid_index=index)
        assert error.message.startswith(f"no RDMA port has a GID with index {index}; there are: mlx5_0 port 1 GID 0")


def test_names_that_there_are_not_list_those_that_there_are() -> None:
    error = refusal(MLX0, IB, device="mlx5_3")
    assert (error.message, error.path) == ("there is no RDMA device 'mlx5_3'; there are: mlx5_0, ib0", "rdma.device")
    error = refusal(MLX0, device="mlx5_0", port=2)
    assert (error.message, error.path) == (
        "there is no port 2 of mlx5_0; there are: mlx5_0 port 1",
        "rdma.port",
    )
    assert refusal(MLX0, port=2).message == "there is no port 2 of any RDMA device; there are: mlx5_0 port 1"
    assert refusal().message == "this machine has no RDMA device"
    assert refusal(DeviceInfo("mlx5_0", ()), device="mlx5_0").message == "mlx5_0 has no port"
    down = replace(IB, ports=(replace(IB.ports[0], state="init"),))
    assert refusal(down, device="ib0").message == "no port of the RDMA device is active: ib0 port 1 is init"


def test_a_device_that_cannot_be_used_says_why() -> None:
    shut = DeviceInfo("mlx5_1", (), problem="/dev/infiniband/uverbs1 may not be opened (permission denied)")
    assert refusal(shut, host="10.1.0.1").message == (
        "no RDMA device can be used: mlx5_1: /dev/infiniband/uverbs1 may not be opened (permission denied)"
    )
    assert refusal(MLX0, shut, host="10.1.0.1").message.endswith("eth0); mlx5_1: " + shut.problem)
    assert choose([shut, MLX0], RdmaOptions(), "10.0.0.1").device == "mlx5_0"


# MTU, and the other end


def test_the_mtu_is_the_ports_unless_the_settings_force_a_lower_one() -> None:
    assert choose([MLX1], RdmaOptions(mtu=2048), "10.1.0.1").mtu == 2048
    error = refusal(MLX0, host="10.0.0.1", mtu=4096)
    assert error.message == "rdma.mtu is 4096, and mlx5_0 port 1 has an active MTU of 1024"
    assert error.hint == "leave rdma.mtu out, or: ip link set dev eth0 mtu 4192 (9000 is usual), all the way"
    small = replace(IB, ports=(replace(IB.ports[0], active_mtu=2048),))
    assert "subnet manager" in refusal(small, host="10.0.0.1", device="ib0", mtu=4096).hint


LOCAL = LocalPort("mlx5_1", 1, "ethernet", GidEntry(3, gid_of("10.1.0.1"), "roce_v2", "eth1"), 0, 4096, 1 << 30)


def met(local: LocalPort = LOCAL, mtu: int = 0, **said: object) -> int:
    theirs: dict[str, object] = {"layer": "ethernet", "kind": "roce_v2", "gid": gid_of("10.1.0.2"), "mtu": 1024}
    return agree(local, RdmaOptions(mtu=mtu), **(theirs | said))  # type: ignore[arg-type] # each test gives its own


def test_ports_of_different_mtu_use_the_lower_one() -> None:
    assert met() == 1024
    assert met(mtu=1024) == 1024
    assert met(replace(LOCAL, mtu=512)) == 512


def test_an_mtu_that_is_forced_and_that_the_peer_lacks_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^rdma\.mtu is 4096 here, and the peer's port has an MTU of 1024 "
    ) as caught:
        agree(LOCAL, RdmaOptions(mtu=4096), layer="ethernet", kind="roce_v2", gid=V4, mtu=1024)
    assert "takes the lower of both" in caught.value.hint


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"layer": "infiniband", "kind": "ib"},
            "mlx5_1 port 1 is on Ethernet, and the peer's port on InfiniBand",
        ),
        ({"kind": "roce_v1"}, "the GID of mlx5_1 port 1 is RoCE v2, and the peer's is RoCE v1"),
        (
            {"gid": gid_of("2001:db8::2")},
            "the GID of mlx5_1 port 1 is 10.1.0.1, and the peer's is 2001:db8::2: not the same family",
        ),
    ],
)
def test_ports_that_cannot_reach_each_other_say_why(said: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        met(**said)  # type: ignore[arg-type] # as above
    assert caught.value.message == message


def test_infiniband_ports_agree_whatever_their_gids_look_like() -> None:
    local = LocalPort("ib0", 1, "infiniband", GidEntry(0, PORT_GID, "ib"), 17, 4096, 1 << 30)
    assert agree(local, RdmaOptions(), layer="infiniband", kind="ib", gid=V6, mtu=2048) == 2048


# Texts


def test_what_carries_the_data_is_told_in_one_line() -> None:
    assert path_text(LOCAL, 1024) == "rdma mlx5_1 port 1, GID 3 (10.1.0.1, RoCE v2), MTU 1024"


def test_gids_are_written_as_people_write_them() -> None:
    assert bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1]) == V4
    assert (gid_text(V4), gid_text(V6)) == ("10.0.0.1", "2001:db8::1")
    assert [is_link_local(gid) for gid in (MAC_GID, gid_of("169.254.1.1"), V4, V6)] == [True, True, False, False]
    assert gid_of("fe80::1%eth0") == gid_of("fe80::1")


# Interfaces


def test_the_hardware_address_of_an_ipoib_interface_holds_the_gid() -> None:
    assert gid_of_hardware("80:00:00:48:fe:80:00:00:00:00:00:00:b8:59:9f:03:00:ab:12:cd\n") == PORT_GID
    for text in ("02:fc:00:00:00:01\n", "", "zz", "80:00"):
        assert gid_of_hardware(text) == b""


def test_the_interface_with_an_address_is_found() -> None:
    table = (
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "20010db8000000000000000000000001 04 40 00 80    ib0\n"
        "broken\n"
    )
    assert interface_of_ipv6(table, ipaddress.IPv6Address("2001:db8::1")) == "ib0"
    assert interface_of_ipv6(table, ipaddress.IPv6Address("2001:db8::2")) == ""
    assert interface_of("127.0.0.1") == interface_of("::ffff:127.0.0.1") == "lo"  # of this machine, as every one has
    assert interface_of("203.0.113.77") == ""


def test_the_port_below_an_interface_is_found() -> None:
    files = {
        "/proc/net/if_inet6": "20010db8000000000000000000000001 04 40 00 80 ib0\n",
        "/sys/class/net/ib0/address": "80:00:00:48:fe:80:00:00:00:00:00:00:b8:59:9f:03:00:ab:12:cd\n",
    }
    assert port_gid("2001:db8::1", lambda path: files.get(path, "")) == PORT_GID
    assert port_gid("2001:db8::2", lambda path: files.get(path, "")) == b""
