"""Long runs, started by `make soak` and not by `make test`.

``OPERATIONS``: how many operations (a million if not said). Agents come from the fixture of the integration tests.
"""

from __future__ import annotations

import os

from tests.integration.conftest import start_agent

__all__ = ["start_agent"]

collect_ignore_glob = [] if os.environ.get("SOAK") else ["test_*.py"]
