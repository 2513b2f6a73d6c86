"""Prometheus' own tools, and real agents whose metrics they read."""

from __future__ import annotations

import pytest
from tests.integration.conftest import start_agent
from tests.monitoring.tools import Tools, find_tools
from tests.support.debian import NotPermitted

__all__ = ["start_agent"]


@pytest.fixture(scope="session")
def tools() -> Tools:
    """Return the tools. Skips where there are none, and none can be fetched."""
    try:
        return find_tools()
    except NotPermitted as reason:
        pytest.skip(str(reason))
