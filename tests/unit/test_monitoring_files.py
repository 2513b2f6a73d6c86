"""docs/monitoring.md, the example alerts and the board name only what there is, and all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from tests.unit.test_docs import tool
from tests.unit.test_logs import calls, record

from allreduced.daemon.log.fields import pairs_of
from allreduced.daemon.log.formats import JsonFormatter
from allreduced.daemon.metrics.catalogue import CATALOGUE, sample_names

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
SERIES = {name: set(described.labels) for described in CATALOGUE for name in sample_names(described)}
OF_THE_LIBRARY = {"up", "process_cpu_seconds_total"}
ADDED = {"instance", "job", "le"}
"""Labels that Prometheus adds, or that buckets have."""
WORDS = {
    *("sum", "by", "without", "on", "group_left", "rate", "increase", "quantile", "histogram_quantile", "max", "count"),
    *("topk", "or", "vector"),
}
"""What the expressions here have of PromQL's language."""


def of_the_alerts() -> Iterator[tuple[str, str]]:
    """Yield every expression of the alerts, with the alert's name."""
    rules = yaml.safe_load((ROOT / "configs" / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def of_the_board() -> Iterator[tuple[str, str]]:
    """Yield every expression of the board, with its panel's title."""
    board = json.loads((ROOT / "configs" / "grafana" / "allreduced.json").read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def test_alerts_and_board_use_series_and_labels_that_there_are() -> None:
    used = set()
    for name, expression in (*of_the_alerts(), *of_the_board()):
        # Labels in matchers and groupings, and what is in quotes, are not names of series.
        bare = re.sub(r'"[^"]*"', "", expression)
        for series, matchers in re.findall(r"([a-z_]\w*)\{([^}]*)\}", bare):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            assert labels <= SERIES.get(series, set()) | ADDED, (name, series, labels)
        grouped = set()
        for listed in re.findall(r"\b(?:by|without|on|group_left)\s*\(([^)]*)\)", bare):
            grouped |= set(re.findall(r"\w+", listed))
        assert grouped <= ADDED.union(*SERIES.values()), name
        bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|group_left)\s*\([^)]*\)", " ", bare)
        names = set(re.findall(r"[A-Za-z_]\w*", bare)) - WORDS
        assert names <= SERIES.keys() | OF_THE_LIBRARY, (name, names - SERIES.keys())
        assert names, name
        used |= names
        for opened, closed in ("()", "[]", "{}"):
            assert expression.count(opened) == expression.count(closed), name
    described = {described.name for described in CATALOGUE if used & set(sample_names(described))}
    for needed in ("ready", "rank_awaited_seconds", "rank_lateness_seconds", "peer_losses_total", "arena_bytes"):
        assert f"allreduced_{needed}" in described


def test_the_alerts_are_whole_and_those_that_people_need_are_there() -> None:
    rules = yaml.safe_load((ROOT / "configs" / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))
    (group,) = rules["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names)
    assert {
        *("AllreducedAgentDown", "AllreducedRankLate", "AllreducedRankAwaited", "AllreducedPeerLost"),
        *("AllreducedArenasNearlyFull", "AllreducedEventLoopHeldUp", "AllreducedConnectionsRefused"),
    } <= set(names)
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_panels_of_the_board_do_not_overlap() -> None:
    board = json.loads((ROOT / "configs" / "grafana" / "allreduced.json").read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_page_has_every_metric_as_make_docs_writes_it() -> None:
    assert tool("metrics_reference").page(PAGE) == PAGE, "run `make docs`"
    assert re.findall(r"^\| `(allreduced_\w+)` \|", PAGE, flags=re.MULTILINE) == [one.name for one in CATALOGUE]
    assert set(re.findall(r"\ballreduced_[a-z_]+\b", PAGE)) <= SERIES.keys() | {one.name for one in CATALOGUE}


def test_the_page_tells_the_keys_of_json_and_the_events_about_groups() -> None:
    for key in JsonFormatter("n").format(record("event=x")).replace('"', "").strip("{}").split(", "):
        assert f"| `{key.partition(':')[0]}` |" in PAGE
    events = {
        pairs[0][1]
        for _, call, at in calls()
        if (pairs := pairs_of(getattr(call.args[at], "value", "") or "")) is not None
    }
    for event in events:
        if event.startswith(("group_", "operation_")):
            assert f"`{event}`" in PAGE, event
