"""The verbs of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Final

from allreduced.core.errors import ConfigError
from allreduced.transports.rdma.verbs.binding import Modules
from allreduced.transports.rdma.verbs.device import OpenDevice
from allreduced.transports.rdma.verbs.survey import describe, names
from allreduced.transports.rdma.verbs_port import Device, DeviceInfo, Verbs, VerbsError

_MISSING_HINT: Final = (
    "install the package python3-pyverbs of Debian or Ubuntu (rdma-core on others) for the Python that runs the agent,"
    " or set the transport to tcp"
)


@cache
def load() -> Verbs:
    """Import pyverbs and return the verbs of this machine.

    :raises ConfigError: pyverbs is not installed, or one that this module does not know.
    """
    # Else closing fails, and keeps what it should close, for all that belonged to a device that was pulled out.
    os.environ.setdefault("RDMAV_ALLOW_DISASSOC_DESTROY", "1")
    try:
        return PyverbsVerbs(Modules())
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "pyverbs"
        text = "pyverbs is not installed" if missing else f"pyverbs is installed but cannot be used: {error}"
        raise ConfigError(f"RDMA cannot be used: {text}", hint=_MISSING_HINT) from error


class PyverbsVerbs:
    """Implements ``verbs_port.Verbs``."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules

    def devices(self) -> Sequence[DeviceInfo]:
        """Return all devices with their ports and GIDs as they are now; empty where there is none."""
        try:
            found = names(self._modules)
        except VerbsError:
            return ()  # the answer of a kernel without any device
        return [describe(self._modules, name) for name in found]

    def open(self, name: str) -> Device:
        """Open a device; see ``verbs_port.Verbs``."""
        return OpenDevice(self._modules, name)
