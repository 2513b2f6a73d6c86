"""Frames for groups that have not started here yet: the news of a group may come later than its first frames."""

from __future__ import annotations

from collections import deque

from allreduced.daemon.engine.context import Context
from allreduced.protocol.peer import EngineFrame


class EarlyFrames:
    """Keeps such frames, a bounded number for a bounded time, and forgets the oldest first."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._frames: deque[tuple[float, str, EngineFrame]] = deque()

    def keep(self, node: str, frame: EngineFrame) -> None:
        """Keep a frame."""
        limits = self._context.limits
        self._frames.append((self._context.now, node, frame))
        oldest = self._context.now - limits.early_seconds
        while self._frames and (len(self._frames) > limits.early_frames or self._frames[0][0] < oldest):
            self._frames.popleft()
            self._context.counters["frames_dropped"] += 1

    def take(self, group: int) -> list[tuple[str, EngineFrame]]:
        """Return the frames of a group that starts now, in order."""
        oldest = self._context.now - self._context.limits.early_seconds
        taken = [(node, frame) for at, node, frame in self._frames if frame.group == group and at >= oldest]
        self._frames = deque(entry for entry in self._frames if entry[2].group != group)
        return taken

    def __len__(self) -> int:
        return len(self._frames)
