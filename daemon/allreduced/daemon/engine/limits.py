"""What the engine may use at most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one engine; bytes unless said otherwise."""

    inline_bytes: int = 8192
    """Results up to here are copied out at delivery (lease 0) and need no result arena."""
    arena_bytes: int = 1 << 30
    """All arenas of the engine together, results and scratch."""
    user_bytes: int = 0
    """What the operations of all groups of one user hold of them, 0 for no such limit; others of that user wait."""
    scratch_bytes: int = 256 << 20
    """Private arenas (receive windows, small results) together; a part of ``arena_bytes``."""
    arena_chunk: int = 1 << 20
    """The smallest arena that is made where memory allows; larger ones are powers of two."""
    window_tiles: int = 4
    """Tiles that one peer may send ahead, per row of the schedule."""
    operations: int = 4096
    """Operations in flight per group (a count)."""
    names: int = 1 << 20
    """Different operation names per group (a count) that are in use at the same time."""
    names_kept: int = 1 << 12
    """Names from which on those that are not in use are forgotten (a count); twice as many may be counted meanwhile."""
    lease_bytes: int = 1 << 30
    """Results that one client may hold under leases."""
    leases: int = 4096
    """Leases of one client (a count)."""
    early_frames: int = 4096
    """Frames kept for groups that are not started here yet (a count)."""
    early_seconds: float = 30.0
    """How long such frames are kept."""
    failure_timeout: float = 5.0
    """Seconds for which a member counts as present after it was last heard."""
    confirm_seconds: float = 5e-3
    """How long a confirmation waits for a READY that can carry it."""
