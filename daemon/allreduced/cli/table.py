"""Tables of fixed columns, printed row by row as results come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A right-aligned column: heading, unit below it, and width in characters."""

    heading: str
    unit: str
    width: int


class Table:
    """Rows under headings; every line is a text that the caller prints."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = tuple(columns)

    def heading(self) -> str:
        """Return the two lines of headings and units, marked as comments."""
        lines = (
            "#" + "".join(f"{text:>{column.width}}" for text, column in zip(texts, self._columns, strict=True))[1:]
            for texts in (
                [column.heading for column in self._columns],
                [column.unit for column in self._columns],
            )
        )
        return "\n".join(line.rstrip() for line in lines)

    def row(self, cells: Sequence[str]) -> str:
        """Return a row; a cell that is too wide pushes the rest to the right."""
        return "".join(f"{cell:>{column.width}}" for cell, column in zip(cells, self._columns, strict=True))
