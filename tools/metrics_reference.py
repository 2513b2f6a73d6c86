"""Writes the table of metrics in docs/monitoring.md from the catalogue: ``make docs``."""

from __future__ import annotations

from pathlib import Path

from allreduced.daemon.metrics.catalogue import CATALOGUE, Described

PAGE = Path(__file__).parents[1] / "docs" / "monitoring.md"
BEGIN = "<!-- metrics: made by `make docs` from daemon/allreduced/daemon/metrics/catalogue.py -->\n"
END = "<!-- end of metrics -->\n"


def page(text: str) -> str:
    """Return the page with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = [_row(described) for described in CATALOGUE]
    table = ["| metric | kind | unit | labels | meaning |", "|---|---|---|---|---|", *rows]
    return f"{before}{BEGIN}\n" + "\n".join(table) + f"\n\n{END}{after}"


def _row(described: Described) -> str:
    labels = ", ".join(f"`{label}`" for label in described.labels)
    return f"| `{described.name}` | {described.kind.value} | {_unit(described.name)} | {labels} | {described.meaning} |"


def _unit(name: str) -> str:
    words = name.removesuffix("_total").split("_")
    return words[-1] if words[-1] in ("seconds", "bytes") else "1"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
