"""The sdist and both wheels: built, installed into clean environments, used. Needs a package index."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
INSTALLED = Path(__file__).with_name("installed.py")
BUILD_SECONDS = 900.0
SECONDS = 300.0

pytestmark = pytest.mark.timeout(1800)


def run(
    *command: str | Path, check: bool = True, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with nothing of this environment that leads to this source."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("ALLREDUCED_", "PYTHON"))}
    words = [str(word) for word in command]
    with subprocess.Popen(
        words,
        env=clean | (environ or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=BUILD_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # compilers, too
            raise
    if check and process.returncode:
        raise AssertionError(f"{command}: status {process.returncode}\n{stdout[-3000:]}\n{stderr[-3000:]}")
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


@dataclass(frozen=True)
class Built:
    """What ``make wheel`` makes: the wheel is made of the sdist, as on a user's machine.

    ``DIST`` names a folder where they are already, such as those that are to be released.
    """

    sdist: Path
    wheel: Path
    pure: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = Path(os.environ["DIST"]) if "DIST" in os.environ else tmp_path_factory.mktemp("dist")
    if "DIST" not in os.environ:
        if importlib.util.find_spec("build") is None:
            pytest.skip("the module build is not installed; `make test-packaging` installs it")
        build = (sys.executable, "-m", "build", "-o", folder)
        run(*build, REPOSITORY)
        run(*build, "--wheel", REPOSITORY, environ={"ALLREDUCED_PURE": "1"})
    (sdist,), (wheel,), (pure,) = (folder.glob(f"*{end}") for end in (".tar.gz", "-linux_*.whl", "-py3-none-any.whl"))
    return Built(sdist, wheel, pure)


class Environment:
    """A virtual environment with nothing but what is installed into it."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.folder = folder
        self.python = folder / "bin" / "python"

    def install(self, what: str) -> None:
        run(self.python, "-m", "pip", "install", "-q", "--disable-pip-version-check", what)

    def installed(self) -> set[str]:
        listed = run(self.python, "-m", "pip", "list", "--disable-pip-version-check", "--format=freeze").stdout
        return {line.partition("==")[0].lower() for line in listed.splitlines()} - {"pip", "setuptools", "wheel"}


@pytest.fixture(scope="module")
def whole(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("whole"))
    environment.install(f"allreduced[agent] @ file://{built.wheel}")
    return environment


@pytest.fixture(scope="module")
def client_only(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("pure"))
    environment.install(str(built.pure))
    return environment


@contextlib.contextmanager
def agent(environment: Environment, socket: str) -> Iterator[None]:
    """Run an agent of an environment."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as ready:
        process = subprocess.Popen(
            [environment.folder / "bin" / "allreduced", "agent", "--socket", socket, "--ready-fd", str(writing)],
            pass_fds=[writing],
            stdin=subprocess.DEVNULL,
        )
        os.close(writing)
        try:
            assert '"ready": true' in ready.readline()
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0


def test_the_sdist_has_what_a_build_needs_and_nothing_that_was_built(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("CMakeLists.txt", "daemon/native/module.cpp", "docs/man/allreduced.1", "LICENSE", "README.md"):
        assert needed in names
    assert "configs/systemd/allreduced.service" in names
    assert not [
        name for name in names if name.endswith((".so", ".pyc")) or name.startswith(("build/", ".ci/", ".venv/"))
    ]


def test_the_wheels_are_what_they_say(built: Built) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{python}-{python}-linux_" in built.wheel.name
    assert built.pure.name.endswith("-py3-none-any.whl")
    whole, pure = (set(zipfile.ZipFile(path).namelist()) for path in (built.wheel, built.pure))
    native = {name for name in whole if name.endswith(".so")}
    assert any("allreduced/daemon/kernels/_native" in name for name in native)
    modules = {name for name in whole if name.startswith("allreduced/")} - native
    assert modules == {name for name in pure if name.startswith("allreduced/")}
    assert "allreduced/__init__.py" not in whole  # a namespace package
    assert [name for name in whole if name.endswith("/share/man/man1/allreduced-agent.1")]


def test_a_job_runs_in_a_clean_environment(whole: Environment) -> None:
    assert run(whole.folder / "bin" / "allreduced", "--version").stdout.startswith("allreduced 0.")
    assert run(whole.python, "-P", INSTALLED).returncode == 0
    assert (whole.folder / "share" / "man" / "man1" / "allreduced-agent.1").is_file()


def test_what_an_extra_would_bring_is_named(whole: Environment) -> None:
    done = run(whole.folder / "bin" / "allreduced", "completion", "bash", check=False)
    assert done.returncode == 1
    assert "pip install 'allreduced[completion]'" in done.stderr


def test_the_client_works_without_native_part_and_compiler(whole: Environment, client_only: Environment) -> None:
    assert client_only.installed() == {"allreduced", "numpy", "msgpack"}
    socket = f"@allreduced-test-packaging-{os.getpid()}"
    job = {"ALLREDUCED_SOCKET": socket, "ALLREDUCED_JOB": "job", "ALLREDUCED_SIZE": "2", "ALLREDUCED_LOCAL_SIZE": "2"}
    first_rank = {**job, "ALLREDUCED_RANK": "0", "ALLREDUCED_LOCAL_RANK": "0", "PATH": "/nowhere"}
    with (
        agent(whole, socket),
        subprocess.Popen(
            [client_only.python, "-P", INSTALLED, "rank"], env=first_rank, stdin=subprocess.DEVNULL
        ) as first,
    ):
        second_rank = {**job, "ALLREDUCED_RANK": "1", "ALLREDUCED_LOCAL_RANK": "1"}
        run(whole.python, "-P", INSTALLED, "rank", environ=second_rank)
        assert first.wait(SECONDS) == 0


def test_without_the_native_part_an_agent_says_what_is_missing(client_only: Environment) -> None:
    client_only.install("msgspec")
    done = run(client_only.python, "-P", "-m", "allreduced.cli.main", "agent", "--socket", "@never", check=False)
    assert done.returncode == 1
    assert "the native kernels cannot be loaded" in done.stderr
    assert "where this is the wheel without them" in done.stderr


def test_pip_takes_the_wheel_with_the_native_part_where_it_fits(
    built: Built, whole: Environment, tmp_path: Path
) -> None:
    run(
        *(whole.python, "-m", "pip", "download", "-q", "--no-deps", "--no-index", "-d", tmp_path),
        *("--find-links", built.wheel.parent, "allreduced"),
    )
    assert [path.name for path in tmp_path.iterdir()] == [built.wheel.name]


def test_a_release_has_wheels_for_both_kinds_of_machine() -> None:
    if importlib.util.find_spec("cibuildwheel") is None:
        pytest.skip("cibuildwheel is not installed; `make test-packaging` installs it")
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux"]
    said = run(*command, "--archs", "x86_64,aarch64", REPOSITORY).stdout.split()
    pythons = ("cp311", "cp312", "cp313", "cp314")
    assert set(said) == {f"{python}-manylinux_{arch}" for python in pythons for arch in ("x86_64", "aarch64")}
