"""Every metric that an agent tells: name, kind, labels, meaning. docs/monitoring.md is made from this."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class Kind(enum.Enum):
    """Prometheus' kinds of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


@dataclass(frozen=True, slots=True)
class Described:
    """One metric. ``name`` ends in its unit, and in ``_total`` for a counter, as Prometheus' conventions say."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()


_GROUP = ("uid", "job_id", "group")
_LINK = ("peer", "transport", "direction")

INFO: Final = Described(
    "allreduced_build_info", Kind.GAUGE, "Always 1; the labels say what runs.", ("version", "node", "loop")
)
READY: Final = Described(
    "allreduced_ready", Kind.GAUGE, "Whether the agent is ready, as /readyz says: 1 for yes, 0 for no."
)
LOOP_LAG: Final = Described(
    "allreduced_event_loop_lag_seconds",
    Kind.HISTOGRAM,
    "How late a timer of the event loop was called, looked at ten times a second.",
)
CLIENTS: Final = Described("allreduced_clients", Kind.GAUGE, "Processes that are connected.")
CLIENTS_LIMIT: Final = Described("allreduced_clients_limit", Kind.GAUGE, "How many may be (limits.clients).")

OPERATIONS: Final = Described(
    "allreduced_operations_total",
    Kind.COUNTER,
    "Calls of collectives that ended, each rank's own; outcome is ok or failed.",
    ("kind", "outcome"),
)
FAILURES: Final = Described(
    "allreduced_operation_failures_total",
    Kind.COUNTER,
    "Calls of collectives that failed, by the code of the error.",
    ("kind", "error"),
)
OPERATION_BYTES: Final = Described(
    "allreduced_operation_bytes_total",
    Kind.COUNTER,
    "Bytes of the tensors of calls that ended well, each rank's own.",
    ("kind",),
)
DURATION: Final = Described(
    "allreduced_operation_duration_seconds",
    Kind.HISTOGRAM,
    "From a rank's call to its result, the wait for other ranks included; size is the smallest class that the tensor "
    "fits into.",
    ("kind", "size"),
)
IN_FLIGHT: Final = Described(
    "allreduced_operations_in_flight", Kind.GAUGE, "Calls of collectives that have not ended, each rank's own."
)

GROUPS: Final = Described("allreduced_groups", Kind.GAUGE, "Groups with ranks on this node.")
GROUPS_LEFT_OUT: Final = Described(
    "allreduced_groups_left_out",
    Kind.GAUGE,
    "Groups among them that have no series of their own (metrics.groups).",
)
GENERATION: Final = Described(
    "allreduced_group_generation",
    Kind.GAUGE,
    "Generation of the group; grows with every change of its members.",
    _GROUP,
)
GROUP_RANKS: Final = Described("allreduced_group_ranks", Kind.GAUGE, "Ranks of the group, on all nodes.", _GROUP)
GROUP_IN_FLIGHT: Final = Described(
    "allreduced_group_operations_in_flight", Kind.GAUGE, "Operations of the group that have not ended here.", _GROUP
)
GROUP_OLDEST: Final = Described(
    "allreduced_group_oldest_operation_seconds",
    Kind.GAUGE,
    "Age of the oldest of them; 0 where there is none.",
    _GROUP,
)
SKEW: Final = Described(
    "allreduced_arrival_skew_seconds",
    Kind.HISTOGRAM,
    "Of each operation, how long after its first sign here the last rank of this node called it.",
    _GROUP,
)
LATENESS: Final = Described(
    "allreduced_rank_lateness_seconds",
    Kind.SUMMARY,
    "How long after the first sign of an operation here, from this node or another, the rank called it.",
    (*_GROUP, "rank"),
)
AWAITED: Final = Described(
    "allreduced_rank_awaited_seconds",
    Kind.GAUGE,
    "How long the oldest operation has waited for this rank to call it; 0 where it has.",
    (*_GROUP, "rank"),
)

ARENA: Final = Described(
    "allreduced_arena_bytes",
    Kind.GAUGE,
    "Shared and private memory for tensors, by use: inputs, results, private (windows of receives, small tensors).",
    ("use",),
)
ARENA_LIMIT: Final = Described(
    "allreduced_arena_limit_bytes",
    Kind.GAUGE,
    "How much there may be, all together (total) and for inputs of clients.",
    ("use",),
)
ARENA_RESERVED: Final = Described(
    "allreduced_arena_reserved_bytes",
    Kind.GAUGE,
    "Bytes of result and private arenas that operations and leases have reserved.",
)
LEASES: Final = Described(
    "allreduced_lease_bytes", Kind.GAUGE, "Results that clients still read, counted once for each of them."
)

KERNEL_SECONDS: Final = Described(
    "allreduced_kernel_seconds_total",
    Kind.COUNTER,
    "Processor time of reductions; where is threads or, for small ones, loop.",
    ("where",),
)
KERNEL_JOBS: Final = Described("allreduced_kernel_jobs_total", Kind.COUNTER, "Reductions.", ("where",))
KERNEL_BYTES: Final = Described("allreduced_kernel_bytes_total", Kind.COUNTER, "Bytes that they read.", ("where",))

PEER_UP: Final = Described("allreduced_peer_up", Kind.GAUGE, "1 while there is a link to the peer, else 0.", ("peer",))
PEERS_UNREACHED: Final = Described(
    "allreduced_peers_never_reached", Kind.GAUGE, "Listed peers to which there was never a link."
)
PEER_SILENCE: Final = Described(
    "allreduced_peer_silence_seconds", Kind.GAUGE, "Since something was heard of the peer.", ("peer",)
)
PEER_LOSSES: Final = Described(
    "allreduced_peer_losses_total", Kind.COUNTER, "How often the peer was declared dead.", ("peer",)
)
LINK_RESETS: Final = Described(
    "allreduced_link_resets_total", Kind.COUNTER, "Links to the peer that ended without a goodbye.", ("peer",)
)
LINK_BYTES: Final = Described(
    "allreduced_link_bytes_total",
    Kind.COUNTER,
    "Bytes of tensors on the wire, without headers; direction is sent or received.",
    _LINK,
)
LINK_FRAMES: Final = Described("allreduced_link_frames_total", Kind.COUNTER, "Frames that carried them.", _LINK)
LINK_CONTROL: Final = Described("allreduced_link_control_frames_total", Kind.COUNTER, "Control frames.", _LINK)
LINK_UNCLAIMED: Final = Described(
    "allreduced_link_unclaimed_frames_total",
    Kind.COUNTER,
    "Frames that came for an operation that was over: read and dropped.",
    ("peer", "transport"),
)

REFUSALS: Final = Described(
    "allreduced_refusals_total",
    Kind.COUNTER,
    "Connections that were turned away or dropped for what they sent or who they are, and joins that a job secret"
    " or a limit stood in the way of, written to the log or not. plane is clients or peers; kind is access,"
    " secret, tls, name, limit, protocol, timeout, hung_up or other.",
    ("plane", "kind"),
)
LOG_LINES: Final = Described(
    "allreduced_log_lines_total",
    Kind.COUNTER,
    "Lines of the log, by event, those that were not written too; level info only where agent.log_level asks for it.",
    ("level", "event"),
)
LOG_DROPPED: Final = Described(
    "allreduced_log_lines_dropped_total",
    Kind.COUNTER,
    "Lines that were not written, for there were too many of their event.",
    ("event",),
)
LOG_LOST: Final = Described(
    "allreduced_log_lines_lost_total",
    Kind.COUNTER,
    "Lines that were to be written, and that standard error or the journal did not take.",
)

CATALOGUE: Final[tuple[Described, ...]] = tuple(value for value in dict(globals()).values() if type(value) is Described)
"""All of them, in this order."""

NAMES: Final[frozenset[str]] = frozenset(described.name for described in CATALOGUE)


def sample_names(described: Described) -> tuple[str, ...]:
    """Return the names of the series that a metric has."""
    match described.kind:
        case Kind.HISTOGRAM:
            return tuple(f"{described.name}{suffix}" for suffix in ("_bucket", "_count", "_sum"))
        case Kind.SUMMARY:
            return tuple(f"{described.name}{suffix}" for suffix in ("_count", "_sum"))
        case _:
            return (described.name,)
