"""What the documentation lists must be what there is."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

from allreduced.cli import cluster_view
from allreduced.core import errors
from allreduced.daemon.engine.operation import ENDED, State
from allreduced.daemon.settings import Settings
from allreduced.schedules.select import ALGORITHMS, TABLE

ROOT = Path(__file__).parents[2]
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")


def tool(name: str) -> ModuleType:
    """Return a module out of tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_page_is_what_make_docs_writes() -> None:
    reference = tool("configuration_reference")
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run `make docs`"


def test_the_tables_about_failures_are_those_of_the_code() -> None:
    tables = tool("failure_tables")
    text = tables.PAGE.read_text(encoding="utf-8")
    assert text == tables.page(text), "run `make docs`"
    assert tables.names(text) == [
        "times",
        "peers",
        "signs",
        "detection",
        "instances",
        "standings",
        "messages",
        "phases",
        "turns",
        "operations",
    ]


def test_the_configuration_page_tells_the_meaning_of_every_setting() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", CONFIGURATION, flags=re.MULTILINE)
    sections = (getattr(Settings(), name) for name in Settings.__struct_fields__)
    assert [key for key, _ in rows] == [key for section in sections for key in section.__struct_fields__]
    assert all(meaning.strip() for _, meaning in rows)


def test_the_example_of_a_configuration_has_every_key() -> None:
    example = tomllib.loads((ROOT / "configs" / "agent.toml").read_text(encoding="utf-8"))
    explained_there = {
        "security": {"secret", "secret_file", "ca", "certificate", "key"}
    }  # an example with a secret would be copied with it
    for name in Settings.__struct_fields__:
        keys = set(getattr(Settings(), name).__struct_fields__) - explained_there.get(name, set())
        assert set(example[name]) == keys, name


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    anchors = {
        page: {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        }
        for page in pages
    }
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if target.startswith("https://"):
                continue
            file, _, anchor = target.partition("#")
            found = (page.parent / file).resolve() if file else page
            assert found.exists(), (page.name, target)
            assert not anchor or anchor in anchors[found], (page.name, target)


def test_the_guide_explains_every_error_that_users_meet() -> None:
    families = {"AllReducedError", "ClusterError", "UsageError", "AccessError"}
    names = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.AllReducedError) and not name.startswith("_")
    }
    for name in names - families:
        assert f"| `{name}" in GUIDE, name


def test_the_keys_of_the_status_in_json_are_told() -> None:
    records = {
        "agents": cluster_view.AgentView,
        "groups": cluster_view.GroupView,
        "gatherings": cluster_view.GatheringView,
        "members": cluster_view.MemberView,
        "ranks": cluster_view.RankView,
        "operations": cluster_view.OperationView,
        "failed": cluster_view.FailedView,
    }
    _, _, section = GUIDE.partition("## See what runs")
    section, _, _ = section.partition("\n## ")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, flags=re.MULTILINE))
    for name, record in records.items():
        told = list(re.findall(r"`(\w+)`", rows[name]))
        assert told == [field.name for field in dataclasses.fields(record)], name
    assert {"version", *(field.name for field in dataclasses.fields(cluster_view.ClusterView))} < set(rows)


def test_the_states_of_operations_are_told() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    for state in set(State) - set(ENDED):
        assert f"`{state.value}`" in page, state


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


def test_the_texts_of_troubleshooting_are_those_of_the_code() -> None:
    """What may differ from case to case (names, numbers, …) divides a text; the parts between must be in the code."""
    page = (ROOT / "docs" / "rdma.md").read_text(encoding="utf-8")
    table = page.split("## Troubleshooting")[1]
    cells = re.findall(r"^\| (`.*?`[^|]*) \|", table, flags=re.MULTILINE)
    texts = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    assert len(texts) > 20
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("*/allreduced/**/*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", sources)
    for text in texts:
        for part in re.split(r"…|[^ ]*\d[^ ]*(?: MiB)?|'x'|\bis (?:RoCE|on) ?|Ethernet|InfiniBand|down|uverbs", text):
            words = part.strip(" ,;:.")
            assert len(words) < 12 or words in code, (text, words)
