"""Links over TCP: one control socket and several data sockets per link, all to one listening port.

Raw non-blocking sockets with ``add_reader`` and ``add_writer``, the same on asyncio and uvloop: payload is received
straight into the posted memory and sent straight from the sender's.
"""

from allreduced.transports.tcp.transport import TcpTransport

TRANSPORT = TcpTransport

__all__ = ["TRANSPORT", "TcpTransport"]
