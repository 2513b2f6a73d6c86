"""The log of groups and of operations that failed: one line each, with job, group, name and generation."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from allreduced.core.errors import AllReducedError, UsageError
from allreduced.core.identity import GroupKey
from allreduced.daemon.engine import events
from allreduced.protocol.change import Change

logger = logging.getLogger("allreduced.groups")

_UNKNOWN = GroupKey(0, "", "")


@dataclass(slots=True)
class _Group:
    key: GroupKey
    generation: int
    ranks: int


class Chronicle:
    """Is told what the engine is told of groups, and how calls failed. Tensors never come here."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._last: tuple[int, str, AllReducedError] | None = None

    def told(self, event: events.Event) -> None:
        """Take note of what the memberships tell the engine about a group."""
        match event:
            case events.GroupStarted():
                self._started(event)
            case events.Changed(group=number, change=change):
                self._changed(number, change)
            case events.GroupBroken(group=number, error=error):
                self.broken(number, error)
            case events.GroupForgotten(group=number):
                self._forgotten(number)
            case _:
                pass

    def broken(self, number: int, error: AllReducedError) -> None:
        """Take note that a group is over on this node, and why."""
        group = self._groups.get(number)
        if group is not None:
            logger.warning(
                "event=group_broken uid=%d job=%s group=%s generation=%d code=%s error=%s",
                *(group.key.uid, group.key.job, group.key.name, group.generation, error.code, error.message),
            )

    def failed(self, call: events.Submitted, error: AllReducedError) -> None:
        """Take note that a call failed. The ranks of this node share one line.

        What the caller has to mend is no warning: whoever runs the agent cannot do anything about it.
        """
        this = (call.group, call.name, error)
        if self._last is not None and self._last == this:
            return
        self._last = this
        group = self._groups.get(call.group)
        key, generation = (group.key, group.generation) if group is not None else (_UNKNOWN, 0)
        logger.log(
            logging.INFO if isinstance(error, UsageError) else logging.WARNING,
            "event=operation_failed uid=%d job=%s group=%s name=%s generation=%d kind=%s rank=%d code=%s error=%s",
            *(key.uid, key.job, key.name, call.name, generation, call.fingerprint.kind, call.rank),
            *(error.code, error.message),
        )

    def _started(self, event: events.GroupStarted) -> None:
        key = event.key
        self._groups[event.group] = _Group(key, event.generation, event.size)
        logger.info(
            "event=group_started uid=%d job=%s group=%s generation=%d ranks=%d nodes=%d local=%d",
            *(key.uid, key.job, key.name, event.generation, event.size, len(event.members), len(event.local)),
        )

    def _changed(self, number: int, change: Change) -> None:
        group = self._groups.get(number)
        if group is None:
            return
        ranks = sum(len(member.ranks) for member in change.members)
        level = logging.WARNING if ranks < group.ranks else logging.INFO
        group.generation, group.ranks = change.generation, ranks
        logger.log(
            level,
            "event=group_changed uid=%d job=%s group=%s generation=%d ranks=%d nodes=%d lost=%s ended=%s",
            *(group.key.uid, group.key.job, group.key.name, change.generation, ranks, len(change.members)),
            ",".join(sorted({loss.node for loss in change.losses})),
            change.ended,
        )

    def _forgotten(self, number: int) -> None:
        group = self._groups.pop(number, None)
        if group is not None:
            logger.info(
                "event=group_ended uid=%d job=%s group=%s generation=%d",
                *(group.key.uid, group.key.job, group.key.name, group.generation),
            )
        if self._last is not None and self._last[0] == number:
            self._last = None
