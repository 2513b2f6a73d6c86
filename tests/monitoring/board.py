"""The expressions of the board as Grafana sends them."""

from __future__ import annotations

from collections.abc import Iterator

from tests.unit.test_monitoring_files import of_the_board

VARIABLES = {"$__rate_interval": "5m", "$instance": ".*", "$job_id": ".*"}
"""What Grafana puts in for its own and the board's variables where all agents and jobs are chosen."""


def queries() -> Iterator[tuple[str, str]]:
    """Yield every expression of the board, with its panel's title."""
    for title, expression in of_the_board():
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)
        assert "$" not in expression, title
        yield title, expression
