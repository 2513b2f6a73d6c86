"""A real Prometheus, set up as docs/monitoring.md says, with real agents: numbers, the board, and alerts."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.agents import StartAgent
from tests.monitoring.agents import ENDED, job, metrics_of, two_agents
from tests.monitoring.board import queries
from tests.monitoring.server import Server, prometheus, until
from tests.monitoring.test_rules import ALERTS
from tests.monitoring.tools import Tools
from tests.unit.test_monitoring_files import PAGE

pytestmark = pytest.mark.timeout(900)  # the first test fetches the tools

SILENT = ["Who is awaited now", "Refused, and lines of the log left out"]
"""Panels with an expression that has no value where all goes well: no rank is awaited, no line was left out."""


def config(targets: list[str]) -> dict[str, Any]:
    """Return what docs/monitoring.md says for prometheus.yml, with other targets and short intervals."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    read = dict(yaml.safe_load(block))
    assert read["rule_files"] == [ALERTS.name]
    read["rule_files"] = [str(ALERTS)]
    (scraped,) = read["scrape_configs"]
    scraped["static_configs"] = [{"targets": targets}]
    read["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    return read


def ended(server: Server) -> dict[tuple[str, str, str], float]:
    """Return how many calls ended, by agent, kind and outcome; zeros are left out."""
    found = {}
    for labels, count in server.query("allreduced_operations_total").items():
        named = dict(labels)
        assert named.keys() == {"__name__", "job", "instance", "kind", "outcome"}
        if count:
            found[named["instance"], named["kind"], named["outcome"]] = count
    return found


def up(server: Server) -> dict[str, float]:
    """Return whether each agent answers."""
    return {dict(labels)["instance"]: value for labels, value in server.query('up{job="allreduced"}').items()}


def silent(server: Server) -> list[str]:
    """Return the panels of which an expression has no value."""
    return [title for title, query in queries() if not server.query(query)]


def test_prometheus_has_the_numbers_of_agents_and_alerts_when_one_is_killed(
    tools: Tools, start_agent: StartAgent, tmp_path: Path
) -> None:
    agents = two_agents(start_agent)
    first, second = (metrics_of(agent) for agent in agents)
    expected = {(at, *how): float(count) for at in (first, second) for how, count in ENDED.items()}

    async def run_job(server: Server) -> None:
        async with job(agents):
            await asyncio.to_thread(until, lambda: ended(server), lambda found: found == expected)
            await asyncio.to_thread(until, lambda: silent(server), lambda found: found == SILENT)

    with prometheus(tools, tmp_path, config([first, second])) as server:
        until(lambda: up(server), lambda found: found == {first: 1.0, second: 1.0})
        asyncio.run(run_job(server))
        until(lambda: server.alerts("AllreducedAgentDown"), lambda found: found == [])
        assert server.alerts("AllreducedPeerLost") == []
        agents[1].kill()
        until(lambda: up(server), lambda found: found == {first: 1.0, second: 0.0})
        by_prometheus = {("job", "allreduced"), ("severity", "critical")}
        down = frozenset({("instance", second)} | by_prometheus), "pending"
        until(lambda: server.alerts("AllreducedAgentDown"), lambda found: found == [down])
        lost = frozenset({("instance", first), ("peer", "b")} | by_prometheus), "firing"
        until(lambda: server.alerts("AllreducedPeerLost"), lambda found: found == [lost])
