"""Being another user for a moment, where tests run as root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

STRANGER = 4321
"""A uid that is nobody's."""

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Let the kernel take this process for another user's: so do the other ends of sockets that are connected here."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
