"""What a machine with systemd consists of: this machine's own files, or those of a Debian that this machine is not."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.debian import NotPermitted, make_tars

REPOSITORY = Path(__file__).parents[2]
CACHE = REPOSITORY / "build" / "systemd"
"""Kept from run to run; `make clean` removes it."""

_SOURCES = ("core", "transports", "client", "daemon")
_DEPENDENCIES = ("numpy", "msgpack", "msgspec", "h11", "prometheus-client", "uvloop")
_INSTALLED = ("numpy", "numpy.libs", "msgpack", "msgspec")
"""Folders of packages on this machine without which there is no agent."""

SUITE, PYTHON = "trixie", "3.13"
_SYSTEM = ("systemd", "systemd-sysv", "dbus", "procps", "python3")
_BUILD = ("g++", "python3-dev", "cmake", "ninja-build")
_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Root:
    """``files``: a file system, which is never written to. ``packages``: a folder for PYTHONPATH.

    ``python``: the folder of the Python installation; None for ``/usr/bin/python3`` of the file system.
    """

    files: Path
    packages: Path
    python: Path | None


def this_machine(folder: Path) -> Root:
    """Return a root that is this machine's, with this source and the packages of this environment.

    :raises NotPermitted: something lacks here.
    """
    if not Path("/lib/systemd/systemd").exists():
        raise NotPermitted("systemd is not installed")
    native = importlib.util.find_spec("allreduced.daemon.kernels._native")
    if native is None or native.origin is None:
        raise NotPermitted("the native module is not built")
    _copy_source(folder, Path(native.origin))
    for name in _INSTALLED:
        found = next((Path(place) / name for place in sys.path if (Path(place) / name).is_dir()), None)
        if found is not None:  # numpy.libs is there for wheels only
            shutil.copytree(found, folder / name, ignore=shutil.ignore_patterns("tests"))
    return Root(Path("/"), folder, Path(sys.base_prefix))


def debian_13(folder: Path) -> Root:
    """Return a root of Debian 13, with this source built by its compiler for its Python.

    :raises NotPermitted: it cannot be made here, or packages cannot be had.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    tar, native, packages = CACHE / f"{SUITE}.tar", _native(), CACHE / f"packages-{PYTHON}"
    _install(("nanobind",), CACHE / "nanobind")
    _install(_DEPENDENCIES, packages)
    make_tars([(tar, _SYSTEM)], suite=SUITE, then=_build_hooks(native), makes=(native,))
    files = folder / "files"
    files.mkdir()
    _run("tar", "-C", str(files), "-xf", str(tar))
    shutil.copytree(packages, folder / "packages", ignore=shutil.ignore_patterns("tests"))
    _copy_source(folder / "packages", native)
    return Root(files, folder / "packages", None)


def _copy_source(folder: Path, native: Path) -> None:
    for name in _SOURCES:
        shutil.copytree(
            REPOSITORY / name / "allreduced",
            folder / "allreduced",
            ignore=shutil.ignore_patterns("__pycache__", "*.so"),
            dirs_exist_ok=True,
        )
    shutil.copy(native, folder / "allreduced" / "daemon" / "kernels" / native.name.rpartition("@")[2])


def _native() -> Path:
    """Return where the native module of this source is kept, built or not."""
    digest = hashlib.sha256()
    for path in sorted([REPOSITORY / "CMakeLists.txt", *(REPOSITORY / "daemon" / "native").glob("*.*")]):
        digest.update(path.read_bytes())
    tag = f"cpython-{PYTHON.replace('.', '')}-{platform.machine()}-linux-gnu"
    return CACHE / f"{digest.hexdigest()[:16]}@_native.{tag}.so"


def _build_hooks(native: Path) -> list[str]:
    def here(path: Path) -> str:
        return shlex.quote(str(path))

    install = shlex.join(["apt-get", "install", "-q", "-y", "--no-install-recommends", *_BUILD])
    build = "cmake -G Ninja -S /source -B /source/build && cmake --build /source/build"
    part = here(native.with_suffix(".part"))
    return [
        f'chroot "$1" env DEBIAN_FRONTEND=noninteractive {install}',
        'mkdir -p "$1/source/daemon"',
        f'cp -r {here(REPOSITORY / "CMakeLists.txt")} {here(CACHE / "nanobind")} "$1/source"',
        f'cp -r {here(REPOSITORY / "daemon" / "native")} "$1/source/daemon"',
        f'chroot "$1" env PYTHONPATH=/source/nanobind sh -c {shlex.quote(build)}',
        f'cp "$1"/source/build/_native.*.so {part} && mv {part} {here(native)}',
    ]


def _install(packages: tuple[str, ...], folder: Path) -> None:
    """Put wheels for the Python of Debian 13 into a folder, unless they are there."""
    if folder.exists():
        return
    machine, part = platform.machine(), folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    # pip takes newer platforms for no better than older ones that are not named.
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in (34, 28, 27, 26, 24, 17)]
    _run(
        *(sys.executable, "-m", "pip", "install", "-q", "--target", str(part), "--only-binary=:all:", "--no-compile"),
        *(f"--python-version={PYTHON}", "--implementation=cp", f"--abi=cp{PYTHON.replace('.', '')}"),
        *(*platforms, f"--platform=manylinux2014_{machine}", *packages),
    )
    part.rename(folder)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise NotPermitted(f"{command[0]} fails: {' / '.join(done.stderr.strip().splitlines()[-2:])}")
