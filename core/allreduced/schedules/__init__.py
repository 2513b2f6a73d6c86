"""Collective algorithms as data: pure functions that return arrays of steps, and the verifier that proves them.

The engine runs a schedule tile by tile; nothing here knows tensors, sockets or time.
"""
