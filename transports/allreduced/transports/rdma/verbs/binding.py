"""pyverbs itself: its modules, whose generations differ, and its errors."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from allreduced.transports.rdma.verbs_port import VerbsError

_ENUM_MODULES: Final = ("pyverbs.enums", "pyverbs.libibverbs_enums")
"""Where the constants are: up to rdma-core 56 at least, and in later ones."""

_NEEDED: Final = {
    "device": ("Context", "get_device_list"),
    "pd": ("PD",),
    "cq": ("CQ", "CompChannel"),
    "mr": ("MR",),
    "qp": ("QP", "QPAttr", "QPCap", "QPInitAttr"),
    "wr": ("RecvWR", "SGE", "SendWR"),
    "addr": ("AHAttr", "GID", "GlobalRoute"),
    "enums": (
        "IBV_ACCESS_LOCAL_WRITE",
        "IBV_ACCESS_REMOTE_WRITE",
        "IBV_QPT_RC",
        "IBV_QP_CAP",
        "IBV_SEND_INLINE",
        "IBV_SEND_SIGNALED",
        "IBV_SEND_SOLICITED",
        "IBV_WR_RDMA_WRITE_WITH_IMM",
        "IBV_WR_SEND",
    ),
}
"""What is used of it, by module."""


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn what pyverbs raises into ``VerbsError``; also where it turns out to be of a version that is not known."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise VerbsError(f"{what}: {error}", getattr(error, "errno", 0) or 0) from error
    except (AttributeError, TypeError) as error:
        raise VerbsError(f"{what}: this version of pyverbs is not known here ({error})") from error
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
        missing = [
            f"{module}.{name}"
            for module, names in _NEEDED.items()
            for name in names
            if not hasattr(getattr(self, module), name)
        ]
        if missing:
            raise ImportError(f"it is of a version that is not known here: {', '.join(missing)} is not there")

    @staticmethod
    def _enums() -> Any:
        for name in _ENUM_MODULES:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError:
                continue
        raise ImportError(f"neither of {', '.join(_ENUM_MODULES)} is there")
