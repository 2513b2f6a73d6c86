"""Lines about what others do wrong, few enough that nobody can fill the disk."""

from __future__ import annotations

import logging

import pytest

from allreduced.core.log_limit import LogLimit


def test_log_lines_are_limited_and_the_rest_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = LogLimit(logging.getLogger("allreduced.test"), lines=2, period=60, clock=lambda: now)
    for number in range(5):
        log.warning("bad number=%d", number)
    now = 61.0
    log.warning("bad number=%d", 5)
    assert [record.getMessage() for record in caplog.records] == [
        "bad number=0",
        "bad number=1",
        "bad number=5 left_out=3",
    ]
