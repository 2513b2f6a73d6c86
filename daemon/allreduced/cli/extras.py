"""Packages that some commands need and the base install lacks."""

from __future__ import annotations

import importlib.util

EXTRAS = {
    "cryptography": "certs",
    "msgspec": "agent",
    "h11": "agent",
    "prometheus_client": "agent",
    "uvloop": "agent",
    "sklearn": "demo",
    "rich": "demo",
    "shtab": "completion",
}
"""Top-level modules, and the extra of the distribution that brings each."""


def require(*modules: str) -> None:
    """Check that the modules can be imported, before anything is started that needs them.

    :raises ModuleNotFoundError: one is not installed; ``name`` says which.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def remedy(error: ModuleNotFoundError) -> str | None:
    """Return the command that installs what was missing, or None where no extra brings it."""
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    return f"pip install 'allreduced[{extra}]'" if extra else None
