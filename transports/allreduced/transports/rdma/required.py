"""What the registry finds under ``rdma``."""

from allreduced.transports.rdma.transport import RdmaTransport

TRANSPORT = RdmaTransport
