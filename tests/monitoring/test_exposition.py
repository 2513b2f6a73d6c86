"""What an agent tells, as ``promtool`` judges it."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.agents import StartAgent
from tests.integration.test_metrics import ask
from tests.monitoring.agents import job, metrics_of, two_agents
from tests.monitoring.tools import Tools

pytestmark = pytest.mark.timeout(900)  # the first test fetches the tools


def test_promtool_has_no_complaint_about_an_agent_with_a_job(tools: Tools, start_agent: StartAgent) -> None:
    agents = two_agents(start_agent)

    async def exposition() -> bytes:
        async with job(agents):
            status, body = await asyncio.to_thread(ask, int(metrics_of(agents[0]).rpartition(":")[2]), "/metrics")
        assert status == 200
        return body

    text = asyncio.run(exposition())
    done = tools.check("check", "metrics", stdin=text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # Nearly all that an agent can tell was there to be judged.
    silent = {family.name for family in text_string_to_metric_families(text.decode()) if not family.samples}
    assert silent == {"allreduced_log_lines_dropped"}


def test_promtool_complains_about_a_counter_that_is_not_named_like_one(tools: Tools) -> None:
    done = tools.check("check", "metrics", stdin=b"# HELP losses Losses.\n# TYPE losses counter\nlosses 1\n")
    assert done.returncode != 0
    assert 'counter metrics should have "_total" suffix' in done.stderr
