"""What the numbers of the verbs interface mean."""

from __future__ import annotations

import socket
from typing import Any, Final

from allreduced.transports.rdma.verbs_port import (
    AsyncKind,
    AsyncNews,
    Completion,
    CompletionKind,
    GidKind,
    LinkLayer,
    PortState,
)

STATES: Final[dict[int, PortState]] = {1: "down", 2: "init", 3: "armed", 4: "active", 5: "active"}
LAYERS: Final[dict[int, LinkLayer]] = {1: "infiniband", 2: "ethernet"}
GID_KINDS: Final[dict[int, GidKind]] = {0: "ib", 1: "roce_v1", 2: "roce_v2"}

_STATUS: Final = {
    1: "local length error",
    2: "local queue pair error",
    4: "local protection error: the memory is not registered for that",
    5: "flushed",
    6: "memory window bind error",
    7: "bad response",
    8: "local access error",
    9: "the peer calls the request invalid",
    10: "the peer refuses access to its memory",
    11: "the peer failed to complete it",
    12: "no acknowledgement of the peer after all retries",
    13: "the peer had no receive request after all retries",
    20: "fatal error of the device",
    21: "no response in time",
    22: "general error",
}
"""What the status of a work completion means (``enum ibv_wc_status``)."""
_FLUSHED: Final = 5

_OPCODE_RECEIVED: Final = 128
_OPCODE_WRITTEN: Final = 129

_NEWS: Final = {
    0: (AsyncKind.QUEUE_FAILED, "completion queue error"),
    1: (AsyncKind.PAIR_FAILED, "queue pair error"),
    2: (AsyncKind.PAIR_FAILED, "invalid request at a queue pair"),
    3: (AsyncKind.PAIR_FAILED, "access violation at a queue pair"),
    8: (AsyncKind.DEVICE_GONE, "the device failed or was removed"),
    10: (AsyncKind.PORT_DOWN, "the port went down"),
}
"""What asynchronous events mean (``enum ibv_event_type``)."""


def gid_text(gid: bytes) -> str:
    """Return a GID in the only form that pyverbs reads: eight groups of four digits.

    ``ipaddress`` writes the address of IPv4 in it with dots from Python 3.13 on.
    """
    digits = gid.hex()
    return ":".join(digits[at : at + 4] for at in range(0, len(digits), 4))


def news(number: int) -> AsyncNews:
    """Return what an asynchronous event says."""
    kind, text = _NEWS.get(number, (AsyncKind.OTHER, f"event {number}"))
    return AsyncNews(kind, text)


def completion(entry: Any) -> Completion:
    """Return what an entry of a completion queue says."""
    status = int(entry.status)
    if status:
        text = _STATUS.get(status, f"status {status}")
        return Completion(entry.wr_id, CompletionKind.SENT, entry.qp_num, error=text, flushed=status == _FLUSHED)
    opcode = int(entry.opcode)
    if opcode == _OPCODE_RECEIVED:
        return Completion(entry.wr_id, CompletionKind.RECEIVED, entry.qp_num, entry.byte_len)
    if opcode == _OPCODE_WRITTEN:
        return Completion(
            entry.wr_id, CompletionKind.WRITTEN, entry.qp_num, entry.byte_len, socket.ntohl(entry.imm_data)
        )
    return Completion(entry.wr_id, CompletionKind.SENT, entry.qp_num)
