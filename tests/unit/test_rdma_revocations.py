"""When a revocation can be confirmed, and how many are remembered."""

from __future__ import annotations

import pytest

from allreduced.transports.rdma import revocations
from allreduced.transports.rdma.revocations import Revocations


def test_it_is_confirmed_at_once_where_nothing_is_on_its_way() -> None:
    known = Revocations()
    assert 7 not in known
    assert known.revoke(7)
    assert 7 in known
    assert known.revoke(7)
    assert len(known) == 1


def test_it_is_confirmed_with_the_last_write_and_once() -> None:
    known = Revocations()
    for _ in range(3):
        known.begin_write(7)
    known.begin_write(8)
    assert not known.end_write(7)
    assert not known.revoke(7)
    assert not known.revoke(7)
    assert not known.end_write(7)
    assert not known.end_write(8)
    assert known.end_write(7)
    known.begin_write(7)
    assert not known.end_write(7)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocations, "MAX_REVOKED", 3)
    known = Revocations()
    for serial in range(10):
        known.revoke(serial)
    assert [serial for serial in range(10) if serial in known] == [7, 8, 9]
