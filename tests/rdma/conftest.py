"""Tests on real verbs. ``make test-rdma`` runs them in a guest that has soft-RoCE; elsewhere they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.rdma import resources
from tests.rdma.nursery import Nursery


@pytest.fixture(autouse=True)
def rdma_device() -> None:
    """Skip where there is not the device that the guest has."""
    if not Path("/sys/class/infiniband/rxe0").exists() or "GUEST_OUT" not in os.environ:
        pytest.skip("no guest with an RDMA device: make test-rdma")


@pytest.fixture(autouse=True)
def nothing_held(rdma_device: None) -> Iterator[None]:
    """Fail a test after which processes, or the kernel, hold more of the device than before."""
    before = resources.held()
    yield
    more = resources.wait_until_back(before)
    assert not more, f"still held: {more}\n{resources.holders()}"


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Return the process that agents and ranks are forked from."""
    with Nursery() as made:
        yield made
