"""Whether this member may deliver: only while it has heard from a quorum of its group, or others may have gone on.

Silence is noticed late, a stall of this agent even later: what was in the socket's buffer when it woke up was sent
before. So after a stall nothing counts as a sign of life for a moment (see ``Engine.handle``).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import inf

from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.group import Group
from allreduced.daemon.quorum import has_quorum

STALL = 0.5
"""Part of the failure timeout: an engine without any event for so long was held up, for peers beat more often."""
DEAF = 1 / 16
"""Part of the failure timeout for which nothing counts as heard after a stall."""


def may_deliver(fresh_until: float, now: float) -> bool:
    """Tell whether a quorum was heard recently enough; the one place where this is decided."""
    return now <= fresh_until


def fresh_until(mine: int, heard: Sequence[float], departed: Set[int], timeout: float) -> float:
    """Return until when ``heard`` (the time by member) makes a quorum in which each was heard within ``timeout``.

    This member always counts. Infinite where it is a quorum alone, minus infinity where there is none.
    """
    votes = {mine}
    if has_quorum(len(heard), votes, departed):
        return inf
    for member in sorted((member for member in range(len(heard)) if member != mine), key=lambda at: -heard[at]):
        votes.add(member)
        if has_quorum(len(heard), votes, departed):
            return heard[member] + timeout
    return -inf


def is_fresh(context: Context, group: Group) -> bool:
    """Tell whether the group's results may be delivered now."""
    now = context.now
    if may_deliver(group.fresh_until, now):
        return True
    heard = [context.heard.get(member.node, -inf) for member in group.members]
    group.fresh_until = fresh_until(group.mine, heard, group.departed, context.limits.failure_timeout)
    return may_deliver(group.fresh_until, now)
