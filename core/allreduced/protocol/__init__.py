"""What goes over the wires, sans-IO: framing, the messages of client and agent, the frames between agents, handshake.

Bytes in, frozen dataclasses out, and back. Client, agent and tests use it; it knows no socket and no clock.
"""
