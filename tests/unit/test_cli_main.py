from __future__ import annotations

import argparse
import errno
import os
import subprocess
import sys

import pytest

from allreduced.cli import bench, run
from allreduced.cli.arguments import factor, nbytes, positive_int, seconds
from allreduced.cli.main import main
from allreduced.core.errors import AgentUnavailable, ConfigError


@pytest.mark.parametrize("command", [[], ["agent"], ["run"], ["demo"], ["bench"], ["status"]])
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    assert "usage: allreduced" in capsys.readouterr().out


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("allreduced ")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["unknown"],
        ["run"],
        ["run", "--nodes", "0", "--", "x"],
        ["run", "--env", "x", "--", "y"],
        ["bench", "-b", "x"],
        ["status", "--timeout", "nan"],
        ["status", "--socket", ""],
    ],
)
def test_wrong_usage_is_status_2_with_a_message(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "error: " in capsys.readouterr().err


def test_ctrl_c_while_the_commands_are_loaded_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> argparse.ArgumentParser:
        raise KeyboardInterrupt

    monkeypatch.setattr("allreduced.cli.main.command_line", interrupted)
    assert main(["status"]) == 130
    assert capsys.readouterr().err == ""
    code = "import sys, allreduced.cli.main; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_it_runs_as_a_module_without_the_packages_of_extras() -> None:
    code = (
        "import sys\nfor name in ('msgspec', 'uvloop', 'sklearn', 'rich'): sys.modules[name] = None\n"
        "from allreduced.cli.main import main\nsys.exit(main(['--version']))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], env=os.environ, check=False, capture_output=True).returncode == 0
    )


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("bad value", hint="use another"), 2, "allreduced: error: bad value\n  hint: use another\n"),
        (AgentUnavailable("no agent"), 1, "allreduced: error: no agent\n"),
        (
            ModuleNotFoundError("No module named 'sklearn'", name="sklearn"),
            1,
            (
                "allreduced: error: this command needs the module sklearn, which is not installed\n"
                "  hint: pip install 'allreduced[demo]'\n"
            ),
        ),
        (
            OSError(errno.EMFILE, "Too many open files"),
            1,
            "allreduced: error: Too many open files\n  hint: raise the limit on open files (ulimit -n)\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_expected_errors_are_a_line_and_a_status(
    error: BaseException,
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def execute(_arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(run, "execute", execute)
    assert main(["run", "--", "x"]) == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("text", "value"), [("8", 8), ("8K", 8192), ("64M", 64 << 20), ("1GiB", 1 << 30), ("4kb", 4096)]
)
def test_sizes_have_units_of_1024(text: str, value: int) -> None:
    assert nbytes(text) == value


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "8X", "８Q"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        nbytes(text)


def test_numbers_out_of_range_are_refused() -> None:
    for check, text in ((positive_int, "0"), (positive_int, "x"), (factor, "1"), (seconds, "-1"), (seconds, "nan")):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a"):
            check(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [(["-b", "16", "-e", "8"], "larger than the last"), (["--op", "mean", "--dtype", "int32"], "mean of int32")],
)
def test_bench_refuses_what_cannot_be_measured(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 2
    assert said in capsys.readouterr().err


def test_ranks_of_bench_measure_what_the_front_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    asked = parser.parse_args(["bench", "-b", "1K", "-e", "4K", "--op", "max", "--view", "--no-check", "--iters", "3"])
    sweep = bench.sweep_of(asked)
    assert bench.sweep_of(parser.parse_args(["bench", *bench.options_of(sweep)])) == sweep
