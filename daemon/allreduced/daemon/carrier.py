"""What carries the data of a link, in words for the log and the status."""

from __future__ import annotations

from allreduced.transports.base import Link


def carrier(link: Link) -> tuple[str, str]:
    """Return the scheme of the transport that carries the link's data, and what is to be told about it.

    The second is the device and its port, or why it is TCP though RDMA was wanted; empty where neither is to be said.
    """
    named, _, path = link.data_path.partition(" ")
    scheme = named or link.remote_address.partition("://")[0]
    return scheme, link.fallback_reason or path
