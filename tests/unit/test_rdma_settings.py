"""The settings of RDMA: what is allowed, what follows from others, and what links are made with."""

from __future__ import annotations

import pytest

from allreduced.core.errors import ConfigError
from allreduced.daemon.settings import Settings
from allreduced.daemon.settings_reader import parse
from allreduced.transports.rdma.options import RdmaOptions


def test_rdma_is_used_where_both_ends_can_unless_something_else_is_said() -> None:
    assert Settings().peers.transport == "auto"
    assert parse('[peers]\ntransport = "rdma"\n', "", {}, {}).peers.transport == "rdma"
    assert parse(None, "", {"ALLREDUCED_PEERS_TRANSPORT": "tcp"}, {}).peers.transport == "tcp"


def test_links_are_made_with_what_the_settings_say() -> None:
    text = """
[rdma]
device = "mlx5_0"
port = 2
gid_index = 3
mtu = 2048
traffic_class = 106
service_level = 3
hop_limit = 32
timeout = 14
retry_count = 3
rnr_retry_count = 5
rdma_plaintext = true
"""
    assert parse(text, "", {}, {}).rdma_options == RdmaOptions(
        device="mlx5_0",
        port=2,
        gid_index=3,
        mtu=2048,
        traffic_class=106,
        service_level=3,
        hop_limit=32,
        timeout=14,
        retry_count=3,
        rnr_retry=5,
        plaintext=True,
    )


@pytest.mark.parametrize(
    ("failure_timeout", "timeout", "retry_count"), [("0.2", 12, 1), ("5", 15, 7), ("30", 17, 7), ("100", 19, 7)]
)
def test_retries_follow_from_the_failure_timeout(failure_timeout: str, timeout: int, retry_count: int) -> None:
    options = parse(None, "", {"ALLREDUCED_FAILURE_FAILURE_TIMEOUT": failure_timeout}, {}).rdma_options
    assert (options.timeout, options.retry_count, options.rnr_retry) == (timeout, retry_count, 6)


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ('[peers]\ntransport = "infiniband"\n', "$.peers.transport", "one of auto, tcp, rdma"),
        ("[rdma]\nmtu = 1500\n", "$.rdma.mtu", "one of 0, 256, 512, 1024, 2048, 4096"),
        ("[rdma]\nport = 256\n", "$.rdma.port", "<= 255"),
        ("[rdma]\ngid_index = -2\n", "$.rdma.gid_index", ">= -1"),
        ("[rdma]\ntraffic_class = 256\n", "$.rdma.traffic_class", "<= 255"),
        ("[rdma]\nservice_level = 16\n", "$.rdma.service_level", "<= 15"),
        ("[rdma]\nhop_limit = 0\n", "$.rdma.hop_limit", ">= 1"),
        ("[rdma]\nrnr_retry_count = 7\n", "$.rdma.rnr_retry_count", "7, for ever, is not allowed"),
        ("[rdma]\nretry_count = 8\n", "$.rdma.retry_count", "<= 7"),
        ("[rdma]\ntimeout = 20\n", "$.rdma.timeout", "17.2 s at the latest, which is longer than"),
        ("[rdma]\ntimeout = 16\nretry_count = 7\n", "$.rdma.timeout", "8.59 s"),
        ("[rdma]\nretry_count = 7\n[failure]\nfailure_timeout = 0.2\n[rdma2]\n", "$.rdma2", "did you mean 'rdma'?"),
        ("[rdma]\nrdma_plain = true\n", "$.rdma.rdma_plain", "did you mean 'rdma_plaintext'?"),
    ],
)
def test_a_wrong_setting_says_where_and_what_is_allowed(text: str, path: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "agent.toml", {}, {})
    assert caught.value.path == f"agent.toml: {path}"
    assert said in str(caught.value)
