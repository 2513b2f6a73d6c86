"""What happens without one of the mechanisms that make failures safe: each can be taken out, and must be missed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias
from unittest import mock

Mutation: TypeAlias = "tuple[tuple[str, str, Callable[..., object]], ...]"
"""Functions, as module and name, and what takes their place."""


def _yes(*_: object, **__: object) -> bool:
    return True


def _no(*_: object, **__: object) -> bool:
    return False


def _nothing(*_: object, **__: object) -> None:
    return None


_ENGINE = "allreduced.daemon.engine."
_MEMBERSHIP = "allreduced.daemon.membership."

MUTATIONS: Mapping[str, Mutation] = {
    "fence": ((f"{_ENGINE}fence", "belongs", _yes),),
    "promises": ((f"{_MEMBERSHIP}ballot", "may_promise", _yes), (f"{_MEMBERSHIP}ballot", "may_accept", _yes)),
    "chosen value": ((f"{_MEMBERSHIP}ballot", "chosen", _nothing),),
    "watermark": ((f"{_ENGINE}kept", "must_keep", _no),),
    "quarantine": ((f"{_ENGINE}change", "at_rest", _yes),),
    "quorum": (("allreduced.daemon.quorum", "has_quorum", _yes),),
    "freshness": ((f"{_ENGINE}freshness", "may_deliver", _yes),),
}
"""By mechanism: what is put out of action."""


@contextmanager
def without(mechanism: str) -> Iterator[None]:
    """Take a mechanism out for a while, wherever its functions were imported to."""
    patches = []
    for module, name, replacement in MUTATIONS[mechanism]:
        original = getattr(importlib.import_module(module), name)
        patches += [mock.patch.object(holder, name, replacement) for holder in _holders(name, original)]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _holders(name: str, original: object) -> list[object]:
    modules = [module for key, module in sys.modules.items() if key.startswith("allreduced.")]
    return [module for module in modules if getattr(module, name, None) is original]
