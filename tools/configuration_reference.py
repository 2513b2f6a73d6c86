"""Writes docs/configuration.md from the schema of the settings: ``make docs``."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import get_type_hints

from msgspec.inspect import (
    BoolType,
    Field,
    FloatType,
    IntType,
    LiteralType,
    Metadata,
    StructType,
    Type,
    VarTupleType,
    type_info,
)

from allreduced.daemon.settings import Settings
from allreduced.daemon.timing import Timing, derived

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

_HEAD = """\
# Configuration of an agent

<!-- made by `make docs` from daemon/allreduced/daemon/settings.py; changes belong there -->

Every setting has a default, and an agent runs without any file. From weakest to strongest:

1. the default,
2. the file: `allreduced agent --config agent.toml`,
3. the environment: `ALLREDUCED_<SECTION>_<KEY>`, such as `ALLREDUCED_ENGINE_THREADS=2`. Lists are separated by commas,
   and a peer is `node=address`. `ALLREDUCED_SECRET` and `ALLREDUCED_INSECURE` are short for those of `[security]`,
4. the options of `allreduced agent`: `--node`, `--socket`, `--listen`, `--peer`.

`allreduced agent --config agent.toml --check` prints the settings that are in effect, the secret masked, and stops. An
unknown section or key, a bad value, or a variable that almost names a setting is an error that says where it is and
what is allowed. So is whatever keeps an agent from starting here: a certificate of another node, an unknown user.
A *size* is a number of bytes, or text such as `"512MiB"`, `"1.5GiB"` or `"64 KB"`. Examples are
[agent.toml](../configs/agent.toml), which names every key, and [single.toml](../configs/single.toml).

A file may say for which form of the configuration it was written, by `version = 1` before its first section; an agent
refuses a file of a later form than it knows, and says so. [operations.md](operations.md) tells which settings a running
agent takes over by a reload.
"""


def page() -> str:
    """Return the whole page."""
    defaults = tomllib.loads(Settings().describe())
    settings = type_info(Settings)
    if not isinstance(settings, StructType):
        raise TypeError("the schema is no struct")
    parts = [_HEAD]
    for section in settings.fields:
        schema, _ = _plain(section.type)
        if not isinstance(schema, StructType):
            raise TypeError(f"{section.name} is no section")
        rows = [_row(field, defaults[section.name]) for field in schema.fields]
        about = inspect.getdoc(schema.cls) or ""
        table = ["| key | what | default | meaning |", "|---|---|---|---|", *rows]
        parts.append("\n".join([f"## `[{section.name}]`", "", about.replace("``", "`"), "", *table, ""]))
    parts.append(_times())
    return "\n".join(parts)


def _times() -> str:
    """Return what follows from the one knob of failure handling."""
    columns = [derived(seconds) for seconds in (1.0, Settings().failure.failure_timeout, 60.0)]
    hints = get_type_hints(Timing, include_extras=True)
    heads = [f"at {timing.failure_timeout:g} s" for timing in columns]
    rows = []
    for name, hint in hints.items():
        cells = [f"{getattr(timing, name):.4g}" for timing in columns]
        rows.append(f"| {' | '.join([name, *cells, hint.__metadata__[0]])} |")
    table = [f"| time | {' | '.join(heads)} | meaning |", f"|{'---|' * (len(heads) + 2)}", *rows]
    about = "In seconds. None of them can be set; `allreduced agent --check` prints those that are in effect."
    return "\n".join(["## What follows from `failure_timeout`", "", about, "", *table, ""])


def _row(field: Field, defaults: dict[str, object]) -> str:
    schema, notes = _plain(field.type)
    meaning = next((str(note["description"]) for note in notes if note.get("description")), "")
    default = defaults.get(field.name, "")
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    cells = [f"`{field.name}`", _kind(schema, notes), f"`{shown}`" if shown not in ("", "[]") else "", meaning]
    return f"| {' | '.join(cells)} |"


def _plain(schema: Type) -> tuple[Type, list[dict[str, object]]]:
    """Return the type without its notes, and these."""
    notes: list[dict[str, object]] = []
    while isinstance(schema, Metadata):
        notes.append({**(schema.extra_json_schema or {}), **(schema.extra or {})})
        schema = schema.type
    return schema, notes


def _kind(schema: Type, notes: list[dict[str, object]]) -> str:
    size = any(note.get("unit") == "bytes" for note in notes)
    if isinstance(schema, LiteralType):
        return ", ".join(f"`{value}`" for value in schema.values)
    if isinstance(schema, BoolType):
        return "true or false"
    if isinstance(schema, IntType | FloatType):
        name = "size" if size else "whole number" if isinstance(schema, IntType) else "number"
        low, high = schema.ge if schema.ge is not None else schema.gt, schema.le
        if low is None:
            return name
        if high is None:
            return f"{name}, at least {_number(low)}"
        return f"{name}, {'more than ' if schema.ge is None else ''}{_number(low)} to {_number(high)}"
    if isinstance(schema, VarTupleType):
        item, _ = _plain(schema.item_type)
        if isinstance(item, StructType):
            return f"tables with {' and '.join(f'`{field.name}`' for field in item.fields)}"
        return "list of whole numbers" if isinstance(item, IntType) else "list of texts"
    return "text"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
