"""Real agents for tests with other frameworks."""

from tests.integration.conftest import start_agent

__all__ = ["start_agent"]
