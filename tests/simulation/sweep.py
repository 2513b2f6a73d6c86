"""Runs many seeds of the simulation, or one run again: ``python -m tests.simulation.sweep FIRST:END --jobs N``.

A seed that fails is made smaller, and both the seed and the smaller run (a file) can be run again:

    python -m tests.simulation.sweep 4711
    python -m tests.simulation.sweep --plan FILE
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.whole.generate import generate
from tests.simulation.whole.scenario import Scenario, load, save
from tests.simulation.whole.shrink import shrink
from tests.simulation.whole.world import World

_CHUNK = 20
_SHOWN = 3
"""Failing seeds that are made smaller."""


@dataclass(slots=True)
class Tally:
    """What a number of runs came to."""

    runs: int = 0
    failed: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By seed: the first invariant that was violated, and how."""
    nodes: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    latest: float = -1e9

    def add(self, other: Tally) -> None:
        """Add what other runs came to."""
        self.runs += other.runs
        self.failed.update(other.failed)
        self.nodes.update(other.nodes)
        self.faults.update(other.faults)
        self.counts.update(other.counts)
        self.latest = max(self.latest, other.latest)


def _prepare() -> None:
    """Let the collector look at nothing that was imported, and only between runs: it would look at everything."""
    gc.collect()
    gc.freeze()
    gc.disable()


def run_seeds(seeds: range) -> Tally:
    """Run some seeds."""
    tally = Tally()
    for seed in seeds:
        if seed % _CHUNK == 0:
            gc.collect()
        scenario = generate(seed)
        world = World(scenario)
        history = world.run()
        tally.runs += 1
        tally.nodes[len(scenario.processes)] += 1
        tally.faults.update(world.faults)
        tally.counts.update(history.counts)
        tally.latest = max(tally.latest, world.latest)
        if history.violations:
            tally.failed[seed] = history.violations[0]
    return tally


def violated(scenario: Scenario) -> str:
    """Run once; return the first invariant that was violated, or nothing."""
    violations = World(scenario).run().violations
    return violations[0][0] if violations else ""


def report(scenario: Scenario, last: int = 40) -> Iterator[str]:
    """Run once; yield what there is to say."""
    world = World(scenario)
    history = world.run()
    yield scenario.describe()
    if not history.violations:
        yield "nothing is wrong with it"
        return
    yield from history.lines(last)
    for invariant, what in history.violations[:10]:
        yield f"VIOLATED {invariant}: {what}"


def reduced(scenario: Scenario) -> tuple[Scenario, Path]:
    """Return a smaller run that fails in the same way, and the file that it is kept in."""
    wanted = violated(scenario)
    smaller = shrink(scenario, lambda candidate: violated(candidate) == wanted)
    folder = Path(tempfile.gettempdir()) / "allreduced-simulation"
    folder.mkdir(exist_ok=True)
    path = folder / f"{scenario.seed}.json"
    save(smaller, path)
    return smaller, path


def explain(scenario: Scenario, last: int = 40) -> Iterator[str]:
    """Yield what is wrong with a failing run, a smaller one, and how to run both again."""
    yield from report(scenario, last)
    smaller, path = reduced(scenario)
    yield ""
    yield "a smaller run that fails in the same way:"
    yield from report(smaller, last)
    yield f"replay: python -m tests.simulation.sweep {scenario.seed}"
    yield f"replay the smaller one: python -m tests.simulation.sweep --plan {path}"


def sweep(first: int, end: int, jobs: int) -> Tally:
    """Run seeds on several processes, with a line of progress."""
    tally = Tally()
    chunks = [range(start, min(end, start + _CHUNK)) for start in range(first, end, _CHUNK)]
    begun = time.monotonic()
    with ProcessPoolExecutor(jobs, initializer=_prepare) as pool:
        for done in as_completed([pool.submit(run_seeds, chunk) for chunk in chunks]):
            found = done.result()
            for seed, (invariant, what) in found.failed.items():
                _say(f"\rseed {seed}: {invariant}: {what[:160]}\n", sys.stderr)
            tally.add(found)
            rate = tally.runs / (time.monotonic() - begun)
            _say(
                f"\r{tally.runs} of {end - first} runs, {len(tally.failed)} failed, {rate:.0f} per second ", sys.stderr
            )
    _say("\n", sys.stderr)
    return tally


def _summary(tally: Tally) -> Iterator[str]:
    yield f"{tally.runs} runs, {len(tally.failed)} failed"
    yield f"  nodes: {_listed(tally.nodes)}"
    yield f"  faults that happened: {_listed(tally.faults)}"
    yield f"  seen: {_listed(tally.counts)}"
    yield f"  latest end of an operation: {tally.latest:.3f} failure timeouts after its deadline"
    by_invariant = Counter(invariant for invariant, _ in tally.failed.values())
    yield f"  violated: {_listed(by_invariant) or 'nothing'}"


def _listed(counts: Counter[int] | Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: str(item[0])))


def _say(text: str, where: object = None) -> None:
    stream = sys.stdout if where is None else sys.stderr
    stream.write(text)
    stream.flush()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="run seeds of the simulation of whole clusters")
    parser.add_argument("seeds", nargs="?", default="", help="FIRST:END, or one seed")
    parser.add_argument("--plan", type=Path, help="run what this file says")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all CPUs)")
    parser.add_argument("--log", type=int, default=40, help="lines of the log to show of a failing run")
    chosen = parser.parse_args()
    if chosen.plan is not None:
        scenario = load(chosen.plan)
        _say("\n".join(report(scenario, chosen.log)) + "\n")
        return 1 if violated(scenario) else 0
    if ":" not in chosen.seeds:
        scenario = generate(int(chosen.seeds))
        wrong = violated(scenario)
        _say("\n".join((explain if wrong else report)(scenario, chosen.log)) + "\n")
        return 1 if wrong else 0
    first, end = map(int, chosen.seeds.split(":"))
    tally = sweep(first, end, chosen.jobs)
    _say("\n".join(_summary(tally)) + "\n")
    for seed in sorted(tally.failed)[:_SHOWN]:
        _say("\n" + "\n".join(explain(generate(seed), chosen.log)) + "\n")
    for seed, (invariant, what) in sorted(tally.failed.items())[_SHOWN:20]:
        _say(f"seed {seed}: {invariant}: {what[:200]}\n")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
