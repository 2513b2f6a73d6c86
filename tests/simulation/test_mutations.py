"""Without any one of the mechanisms that make failures safe the simulation fails; with all of them it does not."""

from __future__ import annotations

import pytest
from tests.simulation.whole.directed import DIRECTED, runs
from tests.simulation.whole.mutations import MUTATIONS, without
from tests.simulation.whole.world import World


@pytest.mark.parametrize("mechanism", MUTATIONS)
def test_a_mechanism_that_is_taken_out_is_missed(mechanism: str) -> None:
    with without(mechanism):
        assert any(World(scenario).run().violations for scenario in runs(mechanism))


@pytest.mark.parametrize("mechanism", MUTATIONS)
def test_with_all_of_them_nothing_is_wrong(mechanism: str) -> None:
    assert list(DIRECTED) == list(MUTATIONS)
    for scenario in runs(mechanism):
        violations = World(scenario).run().violations
        assert not violations, (scenario.seed, violations)
