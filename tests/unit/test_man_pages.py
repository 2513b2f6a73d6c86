"""Man pages and completion follow the command line."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from allreduced.cli.main import main

REPOSITORY = Path(__file__).parents[2]


def made() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("man_pages", REPOSITORY / "tools" / "man_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages: dict[str, str] = module.pages()
    return pages


def test_the_man_pages_are_up_to_date() -> None:
    there = {path.name: path.read_text(encoding="utf-8") for path in (REPOSITORY / "docs" / "man").iterdir()}
    assert there == made(), "run `make docs`"


def test_every_command_has_a_page_and_every_option_is_told() -> None:
    pages = made()
    assert set(pages) >= {"allreduced.1", "allreduced-agent.1", "allreduced-run.1", "allreduced-completion.1"}
    assert "\\fB\\-\\-config\\fR \\fIFILE\\fR\nsettings, in TOML.\n" in pages["allreduced-agent.1"]
    assert "\\fBallreduced\\-agent\\fR(1)" in pages["allreduced.1"]


def test_troff_has_nothing_to_complain_of() -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    for name, page in made().items():
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-w", "mac", "-w", "escape", "-K", "utf8", "-z"],
            input=page,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == "", name


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("status", "--ranks-per-node", "--config"):
        assert word in script
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=30)


def test_another_shell_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 2
    assert "invalid choice: 'fish'" in capsys.readouterr().err
