"""What all sessions of an agent's clients share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allreduced.core.identity import GroupKey
from allreduced.core.log_limit import LogLimit
from allreduced.daemon.arena_table import ArenaTable
from allreduced.daemon.local_limits import LocalLimits
from allreduced.daemon.ports import EventSink
from allreduced.daemon.slab import Slab
from allreduced.daemon.status import Answer
from allreduced.daemon.users import Users

if TYPE_CHECKING:
    from allreduced.daemon.client_session import ClientSession


@dataclass(frozen=True, slots=True)
class LocalContext:
    """What all sessions of an agent share."""

    sink: EventSink
    arenas: ArenaTable
    slab: Slab
    limits: LocalLimits
    node: str
    incarnation: int
    default_deadline: float
    """Seconds, for operations of groups that name none."""
    failure_timeout: float
    """Seconds by which an operation may end later than its deadline."""
    log: LogLimit
    users: Users
    job_secrets: bool
    """Whether a client that joins must give a job secret."""
    drop_stale: Callable[[GroupKey, int], None]
    """Ends the connections that hold ranks of this group and whose processes are gone, other than this client's."""
    ask_status: Callable[[int, bool, Callable[[Answer], None], int], None]
    """Finds out what a user may know, with or without the other agents."""
    changed: Callable[[ClientSession], None]
    """Called when a client was welcomed, and when a connection ended."""
    forget: Callable[[int], None]
    """Called when nothing of this client is left at all."""
