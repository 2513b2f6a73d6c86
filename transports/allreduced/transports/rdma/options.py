"""What RDMA links of one agent are made with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RdmaOptions:
    """Choice of the port, and the parameters of queue pairs. Nothing of it must be the same on both sides.

    Those of a queue pair are in the units of the InfiniBand specification.
    """

    device: str = ""
    """Name such as ``mlx5_0``; empty: the one whose GID is the address through which the peer is reached."""
    port: int = 0
    """Port of the device; 0: the one that fits."""
    gid_index: int = -1
    """Index into the table of GIDs; -1: the entry that fits the address."""
    mtu: int = 0
    """Path MTU in bytes that both ports must allow; 0: the lower of both."""
    traffic_class: int = 0
    service_level: int = 0
    hop_limit: int = 64
    timeout: int = 14
    """An acknowledgement is waited for 4.096 µs × 2^timeout (14: 67 ms) before a packet is sent again."""
    retry_count: int = 7
    """How often a packet without acknowledgement is sent again, up to 7; then the link ends."""
    rnr_retry: int = 6
    """How often a peer without receive requests is asked again, up to 6; credits keep that from happening."""
    plaintext: bool = False
    """Allow RDMA where mutual TLS protects the control flow; the data of RDMA is not encrypted."""
    depth: int = 128
    """Receive requests per queue pair: how many frames of the peer may be on their way."""
    small: int = 8 << 10
    """Payload up to so many bytes goes by SEND through a pool, larger by RDMA WRITE straight into place."""
