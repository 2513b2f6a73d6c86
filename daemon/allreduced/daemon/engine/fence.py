"""The fence between generations: what was sent in another one has no effect."""

from __future__ import annotations


def belongs(frame_generation: int, generation: int) -> bool:
    """Tell whether a frame (or data) of ``frame_generation`` counts for a group in ``generation``."""
    return frame_generation == generation
