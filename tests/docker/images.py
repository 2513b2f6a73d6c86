"""What the images are built from where no image and no package of an index can be pulled inside the build."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.support.debian import NotPermitted, make_tars
from tests.support.docker import Docker

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "docker"
"""Kept from run to run; `make clean` removes it."""

BASE, BUILD = "allreduced-test-base", "allreduced-test-build"
PYTHON = "3.11"
"""Of the Debian that the base is made of."""

DOWNLOAD_SECONDS = 600.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def import_bases(docker: Docker) -> None:
    """Make the images that stand for python:slim: one to run in, and one with a compiler to build in.

    :raises NotPermitted: they cannot be made here.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    layers = {
        BASE: ("python3", "ca-certificates"),
        BUILD: ("g++", "python3-dev", "python3-venv", "cmake", "ninja-build"),
    }
    make_tars([(CACHE / f"{name}.tar", packages) for name, packages in layers.items()])
    for name in layers:
        if docker.attempt("image", "inspect", name).returncode != 0:
            docker.run("import", "--change", f"ENV PATH={PATH}", str(CACHE / f"{name}.tar"), name)


def make_context(directory: Path) -> Path:
    """Copy what an image is built from, with the wheels that it needs; return where ``compose.yaml`` is.

    :raises NotPermitted: the wheels cannot be had.
    """
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "wheels", "build")
    for name in ("core", "transports", "client", "daemon", "tools", "docker"):
        shutil.copytree(ROOT / name, directory / name, ignore=ignored)
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", ".dockerignore"):
        shutil.copy(ROOT / name, directory / name)
    shutil.copytree(_wheels(), directory / "docker" / "wheels")
    return directory / "docker" / "compose.yaml"


def _wheels() -> Path:
    """Return a folder with the wheels of all requirements, for the Python of the base."""
    wanted = _requirements()
    folder, stamp = CACHE / "wheels", CACHE / "wheels.txt"
    if stamp.exists() and stamp.read_text() == "\n".join(wanted):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    machine = platform.machine()
    command = [sys.executable, "-m", "pip", "download", "-q", "--dest", str(folder), "--only-binary=:all:"]
    command += [f"--python-version={PYTHON}", "--implementation=cp", f"--abi=cp{PYTHON.replace('.', '')}"]
    # pip takes newer platforms for no better than older ones that are not named.
    command += [f"--platform=manylinux_2_{minor}_{machine}" for minor in (34, 28, 27, 26, 24, 17)]
    command += [f"--platform=manylinux{name}_{machine}" for name in ("2014", "2010", "1")]
    done = subprocess.run([*command, *wanted], capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    if done.returncode != 0:
        raise NotPermitted(f"the wheels for the images cannot be had: {done.stderr.strip().splitlines()[-1:]}")
    stamp.write_text("\n".join(wanted))
    return folder


def _requirements() -> list[str]:
    """Return what the build, the package and its extras for the images ask for, without the package itself."""
    file = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = file["project"]
    asked = list(file["build-system"]["requires"]) + list(project["dependencies"])
    for extra in ("agent", "dns", "demo"):
        asked += project["optional-dependencies"][extra]
    return sorted({item for item in asked if re.split(r"[\[<>=; ]", item)[0] != "allreduced"})
