"""The alerts and the board, checked by ``promtool``: what it accepts, and which alert fires when."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.monitoring.board import queries
from tests.monitoring.tools import Tools
from tests.unit.test_monitoring_files import ROOT, SERIES, of_the_alerts

from allreduced.daemon.metrics.loop_lag import BOUNDS

pytestmark = pytest.mark.timeout(900)  # the first test fetches the tools

ALERTS = ROOT / "configs" / "prometheus" / "alerts.yaml"
CASES = Path(__file__).with_name("alerts_test.yaml")


def cases() -> Iterator[tuple[str, bool, set[str]]]:
    """Yield of each case the alert, whether it fires, and the names of the series that there are."""
    for test in yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]:
        names = {name for name, _ in inputs(test)}
        for case in test["alert_rule_test"]:
            yield case["alertname"], bool(case["exp_alerts"]), names


def inputs(test: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield name and labels of each series of a test."""
    for listed in test["input_series"]:
        found = re.fullmatch(r"(\w+)\{(.*)\}", listed["series"])
        assert found is not None, listed
        yield found[1], dict(re.findall(r'(\w+)="([^"]*)"', found[2]))


def as_rules(directory: Path, expressions: list[str]) -> Path:
    """Write a file of recording rules."""
    rules = [{"record": f"rule:{number}", "expr": expression} for number, expression in enumerate(expressions)]
    file = directory / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "rules", "rules": rules}]}), encoding="utf-8")
    return file


def test_prometheus_takes_the_alerts(tools: Tools) -> None:
    done = tools.check("check", "rules", "--lint=all", "--lint-fatal", ALERTS)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"SUCCESS: {len(list(of_the_alerts()))} rules found" in done.stdout


def test_prometheus_takes_every_expression_of_the_board(tools: Tools, tmp_path: Path) -> None:
    expressions = [expression for _, expression in queries()]
    done = tools.check("check", "rules", as_rules(tmp_path, expressions))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"SUCCESS: {len(expressions)} rules found" in done.stdout


def test_prometheus_does_not_take_what_is_no_expression(tools: Tools, tmp_path: Path) -> None:
    done = tools.check("check", "rules", as_rules(tmp_path, ["sum by (instance) allreduced_ready[5m]"]))
    assert done.returncode != 0
    assert "could not parse expression" in done.stderr


def test_each_alert_fires_when_it_must_and_says_what_it_must(tools: Tools) -> None:
    done = tools.check("test", "rules", CASES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["Unit", "Testing:", str(CASES), "SUCCESS"]


@pytest.mark.parametrize(("name", "expression"), list(of_the_alerts()))
def test_each_alert_has_a_case_where_it_fires_and_one_where_it_does_not(name: str, expression: str) -> None:
    needed = set(re.findall(r"\b(?:up|allreduced_\w+)\b", re.sub(r'"[^"]*"', "", expression)))
    assert needed
    # A case without the series would be quiet whatever the rule says.
    assert {fires for alert, fires, names in cases() if alert == name and needed <= names} == {True, False}


def test_the_cases_have_series_as_agents_tell_them() -> None:
    for test in yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]:
        for name, labels in inputs(test):
            buckets = {"le"} if name.endswith("_bucket") else set()
            assert labels.keys() == {"job", "instance"} | SERIES.get(name, set()) | buckets, (test["name"], name)
            assert name in SERIES or name == "up", test["name"]
            if name == "allreduced_event_loop_lag_seconds_bucket":
                assert labels["le"] in {*map(str, BOUNDS), "+Inf"}
