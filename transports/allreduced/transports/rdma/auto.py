"""What the registry finds under ``auto``."""

from allreduced.transports.rdma.transport import AutoTransport

TRANSPORT = AutoTransport
