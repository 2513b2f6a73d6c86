"""Why a link over RDMA is over, in the words of its device: what the loop has been told, and what it has not come to.

A port that goes down breaks both ends of a link where both are at it. The end that is quicker resets the control flow,
and the other may hear of that first; "connection reset by peer" would be all that its log says.
"""

from __future__ import annotations

import select
from typing import Final

from allreduced.transports.rdma.endpoint import Endpoint
from allreduced.transports.rdma.verbs_port import AsyncKind, AsyncNews, Completion, VerbsError

REMOVED: Final = "the device was removed"
PAIR_FAILED: Final = "the queue pair failed"
PORT_DOWN: Final = "the port is down"

_LOOK: Final = 64
"""Completions of a queue looked through for the cause of a failure."""
_MOST_NEWS: Final = 16
"""Events of a device looked through."""


def cause_of_news(endpoint: Endpoint, news: AsyncNews) -> str:
    """Return why an event of the device ends the link; empty: it does not."""
    if news.kind is AsyncKind.OTHER:
        return ""
    if news.kind is AsyncKind.PORT_DOWN and _is_active(endpoint):
        return ""  # another port of the device, or it came back; pairs that suffered say so themselves
    return news.text


def cause_of_failure(endpoint: Endpoint, completion: Completion) -> str:
    """Return why a request failed: what happened to the device or its port, else what the completion says.

    A flushed one only tells that another failed, which is looked for. For a link that is over: see ``untold_cause``.
    """
    if cause := _cause_of_device(endpoint):
        return cause
    if not completion.flushed:
        return completion.error
    return _failed_request(endpoint) or PAIR_FAILED


def untold_cause(endpoint: Endpoint) -> str:
    """Return what the device knows that ends the link and nobody has heard yet; empty: nothing.

    For a link that is over anyway: events and completions are taken.
    """
    return _cause_of_device(endpoint) or _failed_request(endpoint)


def _cause_of_device(endpoint: Endpoint) -> str:
    """Return what happened to the device or its port, which requests fail of, too; empty: nothing."""
    device = endpoint.device
    try:
        if device.is_removed():
            return REMOVED
        for _ in range(_MOST_NEWS):
            if not _readable(device.descriptor):
                break
            if cause := cause_of_news(endpoint, device.take_news()):
                return cause
        return "" if device.is_active(endpoint.local.port) else PORT_DOWN
    except VerbsError as error:
        return str(error)


def _failed_request(endpoint: Endpoint) -> str:
    """Return the error of a request that failed by itself, or that some were flushed; empty: none failed."""
    flushed = False
    for queue in (endpoint.sends, endpoint.receives):
        try:
            failed = [completion for completion in queue.poll(_LOOK) if completion.error]
        except VerbsError:
            continue  # the queue is what failed, and says so itself
        for completion in failed:
            if not completion.flushed:
                return completion.error
        flushed = flushed or bool(failed)
    return PAIR_FAILED if flushed else ""


def _is_active(endpoint: Endpoint) -> bool:
    try:
        return endpoint.device.is_active(endpoint.local.port)
    except VerbsError:
        return False


def _readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
