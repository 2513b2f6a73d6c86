"""Whole clusters with every kind of fault: what docs/failure.md promises holds in every run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.simulation.sweep import explain
from tests.simulation.whole.generate import generate
from tests.simulation.whole.scenario import Scenario, load, save
from tests.simulation.whole.shrink import shrink
from tests.simulation.whole.world import World

SEEDS = 2000
BATCH = 50
FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))
"""Runs that showed a bug once, made small."""


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_the_invariants_hold_whatever_goes_wrong(first: int) -> None:
    for seed in range(first, first + BATCH):
        if World(generate(seed)).run().violations:
            pytest.fail("\n".join(explain(generate(seed))), pytrace=False)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_was_wrong_once_stays_right(path: Path) -> None:
    scenario = load(path)
    history = World(scenario).run()
    assert not history.violations, "\n".join([scenario.describe(), *history.lines(60), str(history.violations[0])])


@pytest.mark.parametrize("seed", [3, 14, 15, 92])
def test_a_seed_gives_the_same_run_every_time(seed: int) -> None:
    def run() -> list[str]:
        history = World(generate(seed)).run()
        return [f"{time} {who} {what} {about}" for time, who, what, about in history.log]

    assert run() == run()


def test_a_run_can_be_written_down(tmp_path: Path) -> None:
    for seed in range(20):
        scenario = generate(seed)
        save(scenario, tmp_path / "run.json")
        assert load(tmp_path / "run.json") == scenario


def test_shrinking_leaves_what_the_failure_needs() -> None:
    def fails(scenario: Scenario) -> bool:
        kinds = {fault.kind for fault in scenario.faults}
        return {"cut", "pause"} <= kinds and any(one.kind == "broadcast" for one in scenario.operations)

    seed = next(seed for seed in range(10_000) if fails(generate(seed)) and len(generate(seed).processes) > 3)
    small = shrink(generate(seed), fails)
    assert sorted(fault.kind for fault in small.faults) == ["cut", "pause"]
    assert [one.kind for one in small.operations] == ["broadcast"]
    assert len(small.groups) == 1
    assert len(small.processes) <= 3
