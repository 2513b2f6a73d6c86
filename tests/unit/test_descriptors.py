"""The limit on open files."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from allreduced.daemon.descriptors import raise_descriptor_limit


@pytest.fixture
def low_limit() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_is_raised_to_the_hard_one(low_limit: int) -> None:
    assert raise_descriptor_limit() == low_limit
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (low_limit, low_limit)
    assert raise_descriptor_limit() == low_limit


def test_a_limit_that_the_kernel_refuses_stays(low_limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(what: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_descriptor_limit() == 512
    monkeypatch.undo()
