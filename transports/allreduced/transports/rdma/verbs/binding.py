"""pyverbs itself: its modules, whose generations differ, and its errors."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from allreduced.transports.rdma.verbs_port import VerbsError

_ENUM_MODULES: Final = ("pyverbs.enums", "pyverbs.libibverbs_enums")
"""Where the constants are: up to rdma-core 56 at least, and in later ones."""


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn what pyverbs raises into ``VerbsError``."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise VerbsError(f"{what}: {error}", getattr(error, "errno", 0) or 0) from error
    except Exception as error:
        if not type(error).__module__.startswith("pyverbs"):
            raise
        raise VerbsError(f"{what}: {error}", getattr(error, "error_code", 0) or 0) from error


class Modules:
    """The modules of pyverbs; the difference between its generations ends here."""

    def __init__(self) -> None:
        self.device: Any = importlib.import_module("pyverbs.device")
        self.pd: Any = importlib.import_module("pyverbs.pd")
        self.cq: Any = importlib.import_module("pyverbs.cq")
        self.mr: Any = importlib.import_module("pyverbs.mr")
        self.qp: Any = importlib.import_module("pyverbs.qp")
        self.wr: Any = importlib.import_module("pyverbs.wr")
        self.addr: Any = importlib.import_module("pyverbs.addr")
        self.enums: Any = self._enums()

    @staticmethod
    def _enums() -> Any:
        for name in _ENUM_MODULES:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError:
                continue
        raise ImportError(f"neither of {', '.join(_ENUM_MODULES)} is there")
