"""What the documentation lists must be what there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from msgspec import Meta

from allreduced.core import errors
from allreduced.daemon.settings import Settings
from allreduced.schedules.select import ALGORITHMS, TABLE

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")


def settings_table() -> str:
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    shown = tomllib.loads(Settings().describe())
    for section, keys in shown.items():
        hints = get_type_hints(type(getattr(Settings(), section)), include_extras=True)
        for key in type(getattr(Settings(), section)).__struct_fields__:
            meta = [item for item in getattr(hints[key], "__metadata__", ()) if isinstance(item, Meta)]
            text = next((item.description for item in meta if item.description), "")
            if get_origin(hints[key]) is Literal:
                text = "one of " + ", ".join(get_args(hints[key]))
            default = str(keys.get(key, "")).replace("True", "true").replace("False", "false")
            lines.append(f"| `{section}.{key}` | {f'`{default}`' if default and default != '[]' else ''} | {text} |")
    return "\n".join(lines)


def test_the_guide_lists_every_setting_with_its_default() -> None:
    _, _, rest = GUIDE.partition("<!-- settings -->\n")
    listed, _, _ = rest.partition("\n<!-- /settings -->")
    assert listed == settings_table(), "put the right-hand side between the marks of docs/guide.md"


def test_the_guide_explains_every_error_that_users_meet() -> None:
    families = {"AllReducedError", "ClusterError", "UsageError", "AccessError"}
    not_raised_yet = {"GroupChanged"}
    names = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.AllReducedError) and not name.startswith("_")
    }
    for name in names - families - not_raised_yet:
        assert f"| `{name}" in GUIDE, name


def test_every_dependency_has_its_reason() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        asked += extra
    for requirement in asked:
        name = re.split(r"[\[<>=;]", requirement)[0].strip()
        assert name == "allreduced" or re.search(rf"\b{re.escape(name)}\b", page), name


def test_the_algorithms_and_the_table_that_chooses_them_are_told() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for kind, known in ALGORITHMS.items():
        (line,) = [line for line in page.splitlines() if line.startswith("| ") and f"`{kind}`" in line.split("|")[1]][
            :1
        ]
        assert re.findall(r"`(\w+)`", line.split("|")[2]) == list(known), kind
    _, _, chosen = page.partition("## What is chosen")
    rows = [
        [cell.strip(" `") for cell in line.split("|")[2:-1]] for line in chosen.splitlines() if line.startswith("|")
    ]
    told = [(row[3], int(row[0]), row[1], row[2]) for row in rows[2:6]]
    wanted = [
        (
            choice.algorithm,
            choice.members,
            f"{choice.nbytes >> 20} MiB" if choice.nbytes else "0",
            "all" if choice.narrow else "all but 16-bit floats",
        )
        for kind in ("all_reduce", "broadcast")
        for choice in TABLE[kind]
    ]
    assert told == wanted
    assert TABLE["all_reduce_many"] == TABLE["all_reduce"]
