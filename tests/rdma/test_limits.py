"""Agents that may not use the device, or lock too little memory: who insists is told why, who does not takes TCP."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.agents import AgentProcess, NotStarted, end_processes
from tests.rdma.addresses import Addresses
from tests.rdma.nursery import Nursery
from tests.rdma.starter import FromNursery

from allreduced.core.errors import ConfigError

DEVICE_FILE = Path("/dev/infiniband/uverbs0")
PLENTY = 1 << 34


@contextlib.contextmanager
def started(nursery: Nursery, transport: str, *, memlock: int) -> Iterator[AgentProcess]:
    """Start an agent that may lock so much memory."""
    network = Addresses(ALLREDUCED_PEERS_TRANSPORT=transport, ALLREDUCED_LIMITS_ARENA_BYTES="64MiB")
    with tempfile.NamedTemporaryFile(prefix="pytest-", suffix=".log") as log:
        starter = FromNursery(nursery, memlock=memlock)
        agent = starter.agent("node0", network.arguments(0), network.environment(), log)
        try:
            yield agent
        finally:
            end_processes([agent])


@pytest.fixture
def shut() -> Iterator[None]:
    """Let nobody open the device but by the capability that confined agents have given up."""
    before = DEVICE_FILE.stat()
    os.chown(DEVICE_FILE, 65534, 65534)
    DEVICE_FILE.chmod(0o600)
    yield
    os.chown(DEVICE_FILE, before.st_uid, before.st_gid)
    DEVICE_FILE.chmod(before.st_mode & 0o777)


def refusal(nursery: Nursery, *, memlock: int) -> ConfigError:
    """Return why an agent that insists on RDMA does not start."""
    with pytest.raises(NotStarted) as caught, started(nursery, "rdma", memlock=memlock):
        pass
    assert isinstance(caught.value.error, ConfigError), caught.value
    assert caught.value.status == 2
    return caught.value.error


def test_too_little_locked_memory_is_refused_with_the_command_that_mends_it(nursery: Nursery) -> None:
    error = refusal(nursery, memlock=64 << 10)
    assert "may lock 64 KiB of memory" in error.message
    assert "LimitMEMLOCK=infinity" in error.hint


def test_a_device_file_that_may_not_be_opened_is_named(nursery: Nursery, shut: None) -> None:
    error = refusal(nursery, memlock=PLENTY)
    assert str(DEVICE_FILE) in error.message
    assert str(DEVICE_FILE) in error.hint


def test_who_does_not_insist_goes_on_with_tcp(nursery: Nursery, shut: None) -> None:
    with started(nursery, "auto", memlock=PLENTY) as agent:
        assert agent.stop() == 0


def test_enough_locked_memory_is_enough(nursery: Nursery) -> None:
    with started(nursery, "rdma", memlock=PLENTY) as agent:
        assert agent.stop() == 0
