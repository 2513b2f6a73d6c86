from __future__ import annotations

import pytest

from allreduced.core.addresses import (
    SUN_PATH,
    Address,
    SocketAddress,
    is_link_local,
    is_loopback,
    is_numeric,
    is_wildcard,
    parse_address,
    parse_socket,
)
from allreduced.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "address", "canonical"),
    [
        ("tcp://10.0.0.1:4123", Address("tcp", "10.0.0.1", 4123), "tcp://10.0.0.1:4123"),
        ("10.0.0.1:1", Address("tcp", "10.0.0.1", 1), "tcp://10.0.0.1:1"),
        ("rdma://node-7.example.org:65535", Address("rdma", "node-7.example.org", 65535), None),
        ("tcp://Agent_1:99", Address("tcp", "agent_1", 99), "tcp://agent_1:99"),
        ("[::1]:4123", Address("tcp", "::1", 4123), "tcp://[::1]:4123"),
        ("tcp://[2001:DB8:0::1]:7", Address("tcp", "2001:db8::1", 7), "tcp://[2001:db8::1]:7"),
        ("tcp://[fe80::1%eth0]:7", Address("tcp", "fe80::1%eth0", 7), "tcp://[fe80::1%eth0]:7"),
        ("inproc://a:1", Address("inproc", "a", 1), "inproc://a:1"),
    ],
)
def test_addresses_are_parsed_and_told(text: str, address: Address, canonical: str | None) -> None:
    assert parse_address(text) == address
    assert str(address) == (canonical or text)
    assert parse_address(str(address)) == address


def test_the_scheme_of_a_bare_address_is_the_callers() -> None:
    assert parse_address("h:1", scheme="rdma") == Address("rdma", "h", 1)


def test_host_and_port_alone() -> None:
    assert Address("tcp", "::1", 5).host_port == "[::1]:5"
    assert Address("tcp", "h", 5).host_port == "h:5"


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "it has no port"),
        ("host", "it has no port"),
        ("tcp://host", "it has no port"),
        ("tcp://:4123", "it has no host"),
        ("tcp://[::1]", "it has no port"),
        ("tcp://[::1]4123", "it has no port"),
        ("tcp://[::1:4123", "the bracket of the IPv6 address is not closed"),
        ("tcp://::1:4123", "an IPv6 address must stand in brackets"),
        ("tcp://[host]:1", "'host' is no IPv6 address"),
        ("tcp://[10.0.0.1]:1", "'10.0.0.1' is no IPv6 address"),
        ("tcp://10.0.0.256:1", "'10.0.0.256' is no IPv4 address"),
        ("tcp://127.1:1", "'127.1' is no IPv4 address"),
        ("tcp://a b:1", "'a b' is no host name"),
        ("tcp://a..b:1", "'a..b' is no host name"),
        ("tcp://-a:1", "'-a' is no host name"),
        (f"tcp://{'a' * 64}:1", "is no host name"),
        (f"tcp://{'a.' * 127}b:1", "is no host name"),
        ("tcp://user@host:1", "'user@host' is no host name"),
        ("tcp://host:1/path", "the port '1/path' is not a number from 1 to 65535"),
        ("tcp://host:0", "the port '0' is not a number from 1 to 65535"),
        ("tcp://host:65536", "the port '65536' is not a number from 1 to 65535"),
        ("tcp://host:-1", "the port '-1' is not a number"),
        ("tcp://host:", "the port '' is not a number"),
        ("tcp://host:٣", "the port '٣' is not a number"),
        ("TCP://host:1", "'TCP' is no scheme"),
        ("://host:1", "'' is no scheme"),
    ],
)
def test_malformed_addresses_are_refused_with_the_reason(text: str, fact: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text, path="agent.toml: $.peers.listen")
    assert fact in caught.value.message
    assert repr(text) in caught.value.message
    assert caught.value.path == "agent.toml: $.peers.listen"
    assert "tcp://10.0.0.1:4123" in caught.value.hint


def test_port_0_is_for_listening_only() -> None:
    assert parse_address("tcp://127.0.0.1:0", any_port=True).port == 0
    with pytest.raises(ConfigError, match="0 to 65535"):
        parse_address("tcp://127.0.0.1:65536", any_port=True)


@pytest.mark.parametrize("host", ["localhost", "LocalHost.", "127.0.0.1", "127.9.8.7", "::1", "::ffff:127.0.0.1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "localhost.example.org", "host", "", "::ffff:10.0.0.1"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_wildcards() -> None:
    assert is_wildcard("0.0.0.0")
    assert is_wildcard("::")
    assert not is_wildcard("127.0.0.1")
    assert not is_wildcard("host")


def test_link_local_addresses() -> None:
    assert [is_link_local(host) for host in ("169.254.7.7", "fe80::1", "fe80::1%eth0")] == [True] * 3
    assert [is_link_local(host) for host in ("10.0.0.1", "2001:db8::1", "fe80.example.org")] == [False] * 3


def test_numeric_hosts_need_no_look_up() -> None:
    assert [is_numeric(host) for host in ("10.0.0.1", "::1", "fe80::1%eth0", "0.0.0.0")] == [True] * 4
    assert [is_numeric(host) for host in ("localhost", "node1", "1.2.3", "")] == [False] * 4


def test_socket_paths() -> None:
    address = parse_socket("/run/allreduced/agent.sock")
    assert address == SocketAddress("/run/allreduced/agent.sock")
    assert not address.abstract
    assert address.sockaddr == str(address) == "/run/allreduced/agent.sock"


def test_abstract_sockets() -> None:
    address = parse_socket("@allreduced-1")
    assert address.abstract
    assert address.sockaddr == "\0allreduced-1"
    assert str(address) == "@allreduced-1"


@pytest.mark.parametrize(("lead", "longest"), [("/", SUN_PATH - 1), ("@", SUN_PATH)])
def test_the_longest_socket_is_the_platforms(lead: str, longest: int) -> None:
    assert parse_socket(lead + "x" * (longest - 1)).text == lead + "x" * (longest - 1)
    with pytest.raises(ConfigError, match="takes 109 bytes, 1 more than the 108") as caught:
        parse_socket(lead + "x" * longest, path="ALLREDUCED_SOCKET")
    assert caught.value.path == "ALLREDUCED_SOCKET"
    assert "/run/allreduced/agent.sock" in caught.value.hint


def test_length_is_counted_in_bytes() -> None:
    with pytest.raises(ConfigError, match="takes 152 bytes"):
        parse_socket("/" + "é" * 75)


@pytest.mark.parametrize("text", ["", "@", "/a\0b", "\0name"])
def test_sockets_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_socket(text)
