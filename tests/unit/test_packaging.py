"""What a wheel must hold: parts of one namespace package, typed, each mapped once."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

from allreduced.daemon.kernels import _native

REPOSITORY = Path(__file__).parents[2]
ROOTS = ("core", "transports", "client", "daemon")


def packages() -> dict[str, Path]:
    """Return the packages directly below ``allreduced``, by their name, over all roots."""
    found: dict[str, Path] = {}
    for root in ROOTS:
        for folder in (REPOSITORY / root / "allreduced").iterdir():
            if folder.is_dir() and folder.name != "__pycache__":
                assert folder.name not in found, f"{folder} and {found[folder.name]}"
                found[folder.name] = folder
    return found


def test_allreduced_is_a_namespace_package() -> None:
    for root in ROOTS:
        assert (REPOSITORY / root / "allreduced").is_dir()
        assert not (REPOSITORY / root / "allreduced" / "__init__.py").exists()
        assert not (REPOSITORY / root / "__init__.py").exists()


def test_every_package_says_that_it_is_typed() -> None:
    for folder in packages().values():
        assert (folder / "__init__.py").is_file(), folder
        assert (folder / "py.typed").is_file(), folder


def test_every_folder_of_modules_is_a_package() -> None:
    for package in packages().values():
        for module in package.rglob("*.py"):
            assert (module.parent / "__init__.py").is_file(), module


def test_the_wheel_maps_every_package() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    mapped = settings["tool"]["scikit-build"]["wheel"]["packages"]
    expected = {f"allreduced/{name}": folder.relative_to(REPOSITORY) for name, folder in packages().items()}
    assert {name: Path(folder) for name, folder in mapped.items()} == expected


def test_the_stub_names_what_the_native_module_has() -> None:
    stub = ast.parse((packages()["daemon"] / "kernels" / "_native.pyi").read_text())
    named = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert set(named) == {name for name in dir(_native) if not name.startswith("_")}
    pool = named["Pool"]
    assert isinstance(pool, ast.ClassDef)
    methods = {node.name for node in pool.body if isinstance(node, ast.FunctionDef)} - {"__init__"}
    assert methods == {name for name in dir(_native.Pool) if not name.startswith("_")}
