"""The text by which shapes are compared between ranks, and shown to users when they differ."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable

LONGEST = 512
"""Characters of a text that is told as it is; longer ones are shortened to a beginning and a digest."""

_BEGINNING = 400


def shape_text(shape: Iterable[int]) -> str:
    """Return the canonical text of one shape, as Python writes a tuple: ``(3, 4)``, ``(5,)``, ``()``."""
    return _bounded(_one(shape))


def shapes_text(shapes: Iterable[Iterable[int]], dtypes: Iterable[str] | None = None) -> str:
    """Return the canonical text of the shapes of many tensors, in order: ``(3, 4);(5,)``.

    ``dtypes``: their types, where these are not all the same: ``float32(3, 4);int64(5,)``.
    """
    texts = map(_one, shapes)
    if dtypes is not None:
        texts = map(operator.add, dtypes, texts)
    return _bounded(";".join(texts))


def _one(shape: Iterable[int]) -> str:
    # int(): dimensions may be NumPy integers, which write themselves differently.
    return str(tuple(int(length) for length in shape))


def _bounded(text: str) -> str:
    """Return a text that fits into a message and still differs where ``text`` does."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:_BEGINNING]}… sha256:{hashlib.sha256(text.encode()).hexdigest()}"
