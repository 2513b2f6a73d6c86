"""Which release of allreduced this is."""

from __future__ import annotations

import importlib.metadata
from functools import cache


@cache
def release() -> str:
    """Return the version of the installed distribution; ``unknown`` where it runs from a source tree."""
    try:
        return importlib.metadata.version("allreduced")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
